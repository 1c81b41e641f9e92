"""Looking inside: pictures, reports and differences of what the pipeline makes. Nothing here changes anything."""

from bridge.show.report import Report, explain
from bridge.show.visualize import visualize

__all__ = ["Report", "explain", "visualize"]
