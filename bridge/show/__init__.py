"""Read-only reports and pictures of dispatched modules, stages and programs."""

from bridge.show.report import Report, explain
from bridge.show.visualize import visualize

__all__ = ["Report", "explain", "visualize"]
