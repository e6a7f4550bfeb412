"""Anything: its own types would take a quarter of the time of checking ours."""

from typing import Any

def __getattr__(name: str) -> Any: ...
