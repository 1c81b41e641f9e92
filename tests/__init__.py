"""Tests, sweeps and the fuzz: without the user's disk cache unless told to use one."""

import os

os.environ.setdefault("BRIDGE_CACHE", "0")
