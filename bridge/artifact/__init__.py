"""Artifacts: what was compiled, kept on disk between processes, content-addressed, in a format without pickle."""

from bridge.artifact.once import made_once
from bridge.artifact.settings import CacheSettings, cache_settings
from bridge.artifact.store import (
    Artifact,
    DamagedError,
    Store,
    current_store,
    key_of,
    of_this_package,
    prune,
    read_artifact,
    versions,
    write_artifact,
)

__all__ = ["Artifact", "CacheSettings", "DamagedError", "Store", "cache_settings", "current_store", "key_of"]
__all__ += ["made_once", "of_this_package", "prune", "read_artifact", "versions", "write_artifact"]
