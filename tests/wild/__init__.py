"""Small models of public packages, trained beside eager; ``make test-wild``."""
