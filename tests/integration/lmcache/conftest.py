"""LMCache's own settings, before it is imported: its usage telemetry stays off."""

import os

os.environ["LMCACHE_TRACK_USAGE"] = "false"
