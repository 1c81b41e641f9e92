"""Passes over the loop IR: functions graph → graph, grouped by topic."""
