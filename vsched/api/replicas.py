"""`POST /admin/replicas`: drain, restart or resume one group while the others serve."""

from __future__ import annotations

import logging

from starlette.types import Receive, Scope, Send

from vsched.api import parameters
from vsched.api.contract import ApiSettings, EngineContract
from vsched.api.errors import ClientDisconnected, ParameterRefused
from vsched.api.exchange import Exchange
from vsched.api.responses import GroupAction
from vsched.api.schema import GroupRequest
from vsched.errors import RequestFailed, RequestRefused

logger = logging.getLogger(__name__)
ACTIONS = ("drain", "restart", "resume")


class ReplicasEndpoint:
    """An ASGI application: one action on one group, answered once it is done or its deadline has passed.

    Who disconnects meanwhile stops nothing: `GET /admin/replicas` tells how it went.
    """

    def __init__(self, engine: EngineContract, settings: ApiSettings) -> None:
        self._engine = engine
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = Exchange(scope, receive, send)
        try:
            body = await exchange.read_body(self._settings.body_bytes_max)
            await exchange.send_json(await self._act(body))
        except ClientDisconnected:
            return
        except (RequestRefused, RequestFailed) as error:
            await exchange.send_error(error)
        except Exception:
            logger.exception("an action on a group failed")
            await exchange.send_error(RequestFailed("the server made a mistake"))

    async def _act(self, body: bytes) -> GroupAction:
        request = parameters.decode_body(body, GroupRequest)
        done = True
        match request.action:
            case "drain":
                done = await self._engine.drain_group(request.group)
            case "restart":
                done = await self._engine.restart_group(request.group)
            case "resume":
                self._engine.resume_group(request.group)
            case unknown:
                message = (
                    f"there is no action {unknown!r}. Remedy: name one of {', '.join(ACTIONS)}."
                )
                raise ParameterRefused(message, param="action", code="unknown_action")
        state = next(
            (row["state"] for row in self._engine.groups() if row["name"] == request.group), "down"
        )
        return GroupAction(request.group, request.action, done, state)
