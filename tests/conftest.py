"""Hypothesis searches anew at every local run; in CI it repeats one search, so that a change is
judged by what it changed."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
