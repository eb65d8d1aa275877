"""Doors for callers of other libraries. Nothing here is imported by `import kda`."""
