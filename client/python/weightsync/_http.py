"""Small calls to engines' HTTP servers."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Dict, Optional

from .errors import DeadlineExceededError, FailedPreconditionError, UnavailableError


# A proxy of the environment (http_proxy) is for the world outside, and an engine is beside its controller.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call_http(
    url: str,
    method: str,
    path: str,
    query: Optional[Dict[str, str]] = None,
    body: Optional[Dict[str, Any]] = None,
    timeout: float = 60.0,
) -> Dict[str, Any]:
    """A call with JSON; an answer that is no JSON object is {}."""
    full = f"{url}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(full, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with _direct.open(request, timeout=timeout) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        raise FailedPreconditionError(
            "ENGINE_REFUSED", f"{method} {full} answered {error.code}: {error.read(500).decode(errors='replace')}"
        ) from None
    except (TimeoutError, urllib.error.URLError) as error:
        if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
            raise DeadlineExceededError("ENGINE_TIMEOUT", f"{method} {full} did not answer in time.") from None
        raise UnavailableError("ENGINE_UNREACHABLE", f"{method} {full}: {error}.") from None
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {"results": found}
