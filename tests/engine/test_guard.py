"""The judge over records: what may never be accepted, what may never be refused, and why in words."""

from __future__ import annotations
