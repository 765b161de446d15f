"""Route: GET /metrics, for Prometheus."""

from __future__ import annotations

from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from .metrics import Metrics


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus' text format, or OpenMetrics where that is accepted."""
    known = cast(Metrics, request.app.state.metrics)
    body, media_type = known.exposition(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": media_type})
