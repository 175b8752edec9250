"""Exclusive scans of affine pairs along the chain of segments: LASP, LASP-2, ZeCO and others."""

from .costs import (
    SCHEDULES,
    LinkCosts,
    ScanShape,
    ScanTraffic,
    ScheduleName,
    choose_schedule,
    scan_seconds,
    scan_steps,
    scan_traffic,
)
from .job import ScanResult, Total
from .pair import Pair
from .scan import SCAN, Scan, ScanHandle

__all__ = [
    "SCAN",
    "SCHEDULES",
    "LinkCosts",
    "Pair",
    "Scan",
    "ScanHandle",
    "ScanResult",
    "ScanShape",
    "ScanTraffic",
    "ScheduleName",
    "Total",
    "choose_schedule",
    "scan_seconds",
    "scan_steps",
    "scan_traffic",
]
