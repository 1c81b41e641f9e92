"""Artifacts: compiled results on disk, content-addressed, in a format without pickle."""

from bridge.artifact.codec import (
    DamagedError,
    NoFormError,
    from_parts,
    from_text,
    key_of,
    read_artifact,
    read_safetensors,
    to_parts,
    to_text,
    write_artifact,
    write_file,
    write_safetensors,
    written,
    written_as,
    written_like,
)
from bridge.artifact.settings import CacheSettings, cache_settings
from bridge.artifact.store import Artifact, Store, current_store, made_once, of_this_package, prune, versions

__all__ = ["Artifact", "CacheSettings", "DamagedError", "NoFormError", "Store", "cache_settings", "current_store"]
__all__ += ["from_parts", "from_text", "key_of", "made_once", "of_this_package", "prune", "read_artifact"]
__all__ += ["read_safetensors", "to_parts", "to_text", "versions", "write_artifact", "write_file", "write_safetensors"]
__all__ += ["written", "written_as", "written_like"]
