"""Looking inside: pictures, reports and differences of what the pipeline makes. Nothing here changes anything."""
