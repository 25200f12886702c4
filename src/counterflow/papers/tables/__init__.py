"""The papers' tables that ``counterflow reproduce`` knows, each value beside a measured one."""

from __future__ import annotations

from .schemes import TABLES

__all__ = ["TABLES"]
