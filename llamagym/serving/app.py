"""The HTTP interface: OpenAI's chat completions, and rewards of episodes."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ChatTemplateError, ConfigError, ContextLengthError, EpisodeError, LlamaGymError
from .requests import ChatRequest, EndRequest, RewardRequest
from .worker import Call, Completion, ServerClosedError, UnknownEpisodeError, Worker

# A body of this size exceeds every model's context.
_MOST_BODY_BYTES = 16 * 2**20
_LONGEST_EPISODE_ID = 256


class _ApiError(Exception):
    """An error in the shape of OpenAI's."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status)


def _as_api_error(error: Exception) -> _ApiError:
    """Returns an exception of the library or of the framework in OpenAI's shape."""
    if isinstance(error, _ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return _ApiError(400, str(error), "messages", "context_length_exceeded")
    if isinstance(error, UnknownEpisodeError):
        return _ApiError(404, str(error), code="episode_not_found")
    if isinstance(error, (ChatTemplateError, ConfigError, EpisodeError)):
        return _ApiError(400, str(error))
    if isinstance(error, ServerClosedError):
        return _ApiError(503, str(error))
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    if isinstance(error, HTTPException):
        return _ApiError(error.status_code, str(error.detail))
    return _ApiError(500, f"{type(error).__name__}: {error}")


def _from_validation(error: RequestValidationError) -> _ApiError:
    """Returns the first problem of a request."""
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"] if part not in ("body", "header")]
    message = str(problem["msg"]).removeprefix("Value error, ").rstrip(".?")
    if problem["type"] == "json_invalid":
        return _ApiError(400, f"The body is not JSON: {message}.")
    if problem["type"] in ("model_attributes_type", "missing") and not path:
        return _ApiError(400, "The body must be a JSON object, sent with Content-Type: application/json.")
    if not path:
        return _ApiError(400, f"{message[:1].upper()}{message[1:]}.")
    return _ApiError(400, f"Invalid {'.'.join(path)}: {message}.", ".".join(path))


def make_app(worker: Worker, model_name: str, api_key: str | None, trusted_hosts: Sequence[str]) -> FastAPI:
    """Creates the application.

    Args:
        worker: Answers the calls; started.
        model_name: The model's name in answers.
        api_key: Key that clients must send; None for no key.
        trusted_hosts: Names by which clients may address the server. A page in a browser on the same machine can reach
            it by other names.
    """
    app = FastAPI(title="llamagym", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(_check_key)])
    app.state.api_key = api_key
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(trusted_hosts))
    app.add_middleware(_LimitBody)
    for kind in (_ApiError, LlamaGymError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _on_error)
    started = int(time.time())

    @app.get("/v1/models")
    @app.get("/v1/episodes/{episode_id}/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model_name, "object": "model", "created": started, "owned_by": "llamagym"}
        return {"object": "list", "data": [entry]}

    @app.post("/v1/chat/completions")
    @app.post("/v1/episodes/{episode_id}/chat/completions")
    async def complete(
        body: ChatRequest,
        request: Request,
        episode_id: str | None = None,
        x_episode_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        episode = episode_id or x_episode_id or body.user
        if worker.is_learning and not episode:
            raise _ApiError(
                400,
                "The agent is learning, so a call must name its episode: in the address, /v1/episodes/ID, in the "
                "header X-Episode-Id, or in the field user.",
                "user",
            )
        if episode and len(episode) > _LONGEST_EPISODE_ID:
            raise _ApiError(400, f"An episode's id may have {_LONGEST_EPISODE_ID} characters.", "user")
        answer = _Answer(worker, body, episode, model_name)
        if body.stream:
            events = answer.events()
            # An error before the first event has a status of its own.
            first = await anext(events)
            return StreamingResponse(_after(first, events), media_type="text/event-stream")
        return JSONResponse(await answer.whole(request))

    @app.post("/v1/episodes/{episode_id}/reward")
    async def reward(episode_id: str, body: RewardRequest) -> dict[str, Any]:
        await asyncio.wrap_future(worker.assign_reward(episode_id, body.reward, body.turn))
        return {"id": episode_id, "object": "episode"}

    @app.post("/v1/episodes/{episode_id}/end")
    async def end(episode_id: str, body: EndRequest) -> dict[str, Any]:
        stats = await asyncio.wrap_future(
            worker.end(episode_id, body.reward, body.truncated, body.group, body.chat_messages(), body.chat_tools())
        )
        update = {name: _json_number(value) for name, value in stats.items()}
        return {"id": episode_id, "object": "episode", "update": update or None}

    @app.delete("/v1/episodes/{episode_id}")
    async def discard(episode_id: str) -> dict[str, Any]:
        await asyncio.wrap_future(worker.discard(episode_id))
        return {"id": episode_id, "object": "episode", "deleted": True}

    return app


class _LimitBody:
    """Rejects a body that is too long to be read, by its announced length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        length = headers.get("content-length", "0")
        error = None
        if "transfer-encoding" in headers:
            error = _ApiError(411, "Send the body with a Content-Length.")
        elif not length.isdecimal() or int(length) > _MOST_BODY_BYTES:
            error = _ApiError(413, f"The body may have {_MOST_BODY_BYTES} bytes, and has {length[:20]}.")
        answer = self._app if error is None else error.response()
        await answer(scope, receive, send)


async def _check_key(request: Request, authorization: Annotated[str, Header()] = "") -> None:
    """Rejects a request without the server's key."""
    key = request.app.state.api_key
    if key is not None and not secrets.compare_digest(authorization.encode(), f"Bearer {key}".encode()):
        raise _ApiError(
            401, "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.", code="invalid_api_key"
        )


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    return _as_api_error(error).response()


def _json_number(value: Any) -> float | None:
    """Returns a statistic as JSON holds it: NaN and infinities are None."""
    number = float(value)
    return number if abs(number) < float("inf") else None


class _Answer:
    """The answer to one request: one or several replies, whole or as a stream of events."""

    def __init__(self, worker: Worker, request: ChatRequest, episode_id: str | None, model_name: str) -> None:
        """Prepares the calls of a request."""
        self._worker = worker
        self._request = request
        self._episode_id = episode_id
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model_name}
        self._events: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()
        tools = [] if request.tool_choice == "none" else request.chat_tools()
        opening = ""
        if request.forced_tool is not None:
            opening = worker.template.call_opening + request.forced_tool
        self._calls = [
            Call(
                messages=request.chat_messages(),
                tools=tools,
                opening=opening,
                token_limit=request.token_limit,
                temperature=request.temperature,
                top_p=request.top_p,
                stops=request.stops,
                episode_id=episode_id,
            )
            for _ in range(request.n or 1)
        ]

    async def whole(self, request: Request) -> dict[str, Any]:
        """Returns all replies when they are finished; stops writing them if the client leaves."""
        waiting = asyncio.gather(*(self._submit(call) for call in self._calls))
        leaving = asyncio.ensure_future(_disconnected(request))
        ends: list[asyncio.Future[Any]] = [waiting, leaving]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise _ApiError(499, "The client has left.")
            completions = waiting.result()
        finally:
            leaving.cancel()
            self._cancel()
            waiting.cancel()
        choices = [
            {
                "index": index,
                "message": {"refusal": None, **_api_message(completion)},
                "logprobs": self._logprobs(completion),
                "finish_reason": completion.finish_reason,
            }
            for index, completion in enumerate(completions)
        ]
        whole = {"object": "chat.completion", **self._head, "choices": choices, "usage": _usage(completions)}
        return whole | self._recorded(completions)

    def _submit(self, call: Call) -> asyncio.Future[Completion]:
        self._worker.submit(call)
        return asyncio.wrap_future(call.completion)

    def _cancel(self) -> None:
        for call in self._calls:
            call.is_cancelled = True

    def _recorded(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Returns where the replies were recorded, which is not a part of OpenAI's API; empty if they were not."""
        turns = [completion.turn for completion in completions]
        if None in turns:
            return {}
        return {"episode": {"id": self._episode_id, "turns": turns}}

    async def events(self) -> AsyncGenerator[str, None]:
        """Yields the replies as server-sent events; stops writing them if the client leaves.

        An error before the first event is raised; a later one is the last event.
        """
        loop = asyncio.get_running_loop()
        has_begun = False
        try:
            for index, call in enumerate(self._calls):
                call.send = partial(self._enqueue, loop, index)
                # No piece follows the end.
                call.completion.add_done_callback(lambda _, send=call.send: send(None))  # type: ignore[misc]
                self._worker.submit(call)
            unfinished = len(self._calls)
            while unfinished:
                index, piece = await self._events.get()
                completion = None if piece is not None else self._calls[index].completion.result()
                if not has_begun:
                    has_begun = True
                    for position in range(len(self._calls)):
                        yield self._chunk(position, {"role": "assistant", "content": ""})
                if piece is not None:
                    yield self._chunk(index, {"content": piece})
                if completion is None:
                    continue
                unfinished -= 1
                if "tool_calls" in completion.message:
                    yield self._chunk(index, {"tool_calls": _api_calls(completion, with_index=True)})
                yield self._chunk(index, {}, completion)
            completions = [call.completion.result() for call in self._calls]
            options = self._request.stream_options
            if options is not None and options.include_usage:
                yield self._event({"choices": [], "usage": _usage(completions), **self._recorded(completions)})
            yield "data: [DONE]\n\n"
        except Exception as error:
            if not has_begun:
                raise
            yield f"data: {json.dumps(_as_api_error(error).body())}\n\n"
        finally:
            self._cancel()

    def _enqueue(self, loop: asyncio.AbstractEventLoop, index: int, piece: str | None) -> None:
        """Passes a piece of a reply, or None for its end, from the worker's thread to the server's."""
        # The loop is closed if the server stopped meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._events.put_nowait, (index, piece))

    def _chunk(self, index: int, delta: dict[str, Any], completion: Completion | None = None) -> str:
        """Returns an event with a part of a reply; `completion` marks the last one."""
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if completion is None else self._logprobs(completion),
            "finish_reason": None if completion is None else completion.finish_reason,
        }
        return self._event({"choices": [choice]})

    def _event(self, content: dict[str, Any]) -> str:
        return f"data: {json.dumps({'object': 'chat.completion.chunk', **self._head, **content})}\n\n"

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        """Returns the log-probability of each token of a reply, if the client wants it."""
        if not self._request.logprobs:
            return None
        content = []
        reply = completion.reply
        for token, logprob in zip(reply.ids, reply.logprobs, strict=True):
            text = self._worker.token_text(token)
            # Some tokens are a part of a character only.
            encoded = None if "\ufffd" in text else list(text.encode())
            content.append({"token": text, "logprob": logprob, "bytes": encoded, "top_logprobs": []})
        return {"content": content, "refusal": None}


async def _after(first: str, events: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """Yields the first event and the others; closes their generator if the client leaves."""
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def _disconnected(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _api_message(completion: Completion) -> dict[str, Any]:
    """Returns a reply as OpenAI's API shows it."""
    message = {"role": "assistant", "content": completion.message["content"]}
    if "tool_calls" in completion.message:
        message["content"] = message["content"] or None
        message["tool_calls"] = _api_calls(completion)
    return message


def _api_calls(completion: Completion, with_index: bool = False) -> list[dict[str, Any]]:
    """Returns a reply's tool calls as OpenAI's API shows them: arguments are JSON text."""
    calls = []
    for index, call in enumerate(completion.message["tool_calls"]):
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        shown = {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append({"index": index, **shown} if with_index else shown)
    return calls


def _usage(completions: Sequence[Completion]) -> dict[str, int]:
    """Returns the number of tokens of a request; its prompt counts once."""
    prompt = completions[0].prompt_length
    replies = sum(len(completion.reply.ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": replies, "total_tokens": prompt + replies}
