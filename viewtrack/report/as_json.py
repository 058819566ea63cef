"""A report as JSON, and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ..errors import ViewTrackError
from ..ledger import Region, Write
from ..site import Site
from ..smuggled import Hazard
from .model import Alias, HazardRow, OpRow, Report, ViewRow, WriteRow

#: Goes up when a reader of the old form could not read the new one.
FORMAT = 1


def to_json(report: Report) -> str:
    """The report as a JSON object: `Report` by its attributes, and ``"format"``."""
    return json.dumps({"format": FORMAT, **dataclasses.asdict(report)}, indent=1) + "\n"


def from_json(text: str) -> Report:
    """The report that `to_json` wrote.

    Raises:
        ViewTrackError: the text is no report, or one of another format.
    """
    try:
        data = json.loads(text)
        form = data.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ViewTrackError("not a report of viewtrack: it is no JSON with a `format`") from error
    if form != FORMAT:
        raise ViewTrackError(
            f"a report of format {form}, and this viewtrack reads format {FORMAT}; "
            "write it anew with `python -m viewtrack run`"
        )
    try:
        return _report(data)
    except (KeyError, TypeError) as error:
        raise ViewTrackError(f"not a report of viewtrack: {error}") from error


def _report(data: dict[str, Any]) -> Report:
    return Report(
        **{
            **data,
            "hazards": tuple(
                HazardRow(_hazard(row["hazard"]), row["count"]) for row in data["hazards"]
            ),
            "views": tuple(ViewRow(**_with_site(row)) for row in data["views"]),
            "writes": tuple(WriteRow(**_with_site(row)) for row in data["writes"]),
            "aliases": tuple(Alias(**_with_site(row)) for row in data["aliases"]),
            "ops": tuple(OpRow(**row) for row in data["ops"]),
            "threads": tuple(data.get("threads", ())),
        }
    )


def _hazard(data: dict[str, Any]) -> Hazard:
    writes = tuple(map(_write, data["writes"]))
    sites = {name: _site(data[name]) for name in ("saved", "used")}
    through = tuple(data.get("through", ()))
    return Hazard(**{**data, **sites, "writes": writes, "through": through})


def _write(data: dict[str, Any]) -> Write:
    region = data["region"]
    if region is not None:
        region = Region(
            **{**region, "size": tuple(region["size"]), "stride": tuple(region["stride"])}
        )
    return Write(**{**_with_site(data), "region": region})


def _with_site(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "site": _site(data["site"])}


def _site(data: dict[str, Any]) -> Site:
    return Site(**{**data, "stack": tuple(map(tuple, data["stack"]))})
