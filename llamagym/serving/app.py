"""The HTTP interface: OpenAI's chat completions, and rewards of episodes."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Collection, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ChatTemplateError, ConfigError, ContextLengthError, EpisodeError, LlamaGymError
from .requests import ChatRequest, EndRequest, RewardRequest
from .worker import Call, Completion, ServerClosedError, UnknownEpisodeError, Worker

Result = TypeVar("Result")

# Larger bodies are rejected.
_MAX_BODY_BYTES = 16 * 2**20
# What can be a part of an address, and of a header, without being encoded.
_EPISODE_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~:@+-]{1,256}")


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
    if isinstance(error, RecursionError):
        return _ApiError(400, "The messages or tools are nested too deeply.")
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


def make_app(worker: Worker, model_name: str, api_key: str | None, hosts: Collection[str]) -> ASGIApp:
    """Creates the application.

    Args:
        worker: Answers the calls; started.
        model_name: The model's name in answers.
        api_key: Key that clients must send; None for no key.
        hosts: Accepted names in Host headers, which prevents DNS rebinding; empty accepts all.
    """
    app = FastAPI(title="llamagym", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for kind in (_ApiError, LlamaGymError, HTTPException, RequestValidationError, RecursionError, Exception):
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
        x_session_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        # The address takes precedence over the headers, and these over the field. X-Session-ID is what verifiers sends.
        episode = None
        if worker.is_learning:
            episode = episode_id or x_episode_id or x_session_id or body.user
            _check_episode_id(episode)
        answer = _Answer(worker, body, episode, model_name)
        if body.stream:
            events = answer.events()
            # An error before the first event has a status of its own.
            first = await _unless_disconnected(request, anext(events))
            return StreamingResponse(_after(first, events), media_type="text/event-stream")
        return JSONResponse(await answer.whole(request))

    @app.post("/v1/episodes/{episode_id}/reward")
    async def reward(episode_id: str, body: RewardRequest) -> dict[str, Any]:
        await asyncio.wrap_future(worker.submit_task(lambda: worker.assign_reward(episode_id, body.reward, body.turn)))
        return {"id": episode_id, "object": "episode"}

    @app.post("/v1/episodes/{episode_id}/end")
    async def end(episode_id: str, body: EndRequest) -> dict[str, Any]:
        messages = body.chat_messages()
        tools = body.chat_tools()
        stats = await asyncio.wrap_future(
            worker.submit_task(lambda: worker.end(episode_id, body.reward, body.truncated, body.group, messages, tools))
        )
        update = {name: _json_number(value) for name, value in stats.items()}
        return {"id": episode_id, "object": "episode", "update": update or None}

    @app.delete("/v1/episodes/{episode_id}")
    async def discard(episode_id: str) -> dict[str, Any]:
        await asyncio.wrap_future(worker.submit_task(lambda: worker.discard(episode_id)))
        return {"id": episode_id, "object": "episode", "deleted": True}

    return _Guard(app, api_key, hosts)


def _check_episode_id(episode: str | None) -> None:
    """Rejects a call without an episode, or with an id that could not be a part of an address."""
    if episode is None:
        raise _ApiError(
            400,
            "The agent is learning, so a call must name its episode: in the address, /v1/episodes/ID, in the header "
            "X-Episode-Id, or in the field user.",
            "user",
        )
    if not _EPISODE_ID.fullmatch(episode):
        raise _ApiError(
            400, "An episode's id has 1 to 256 characters: letters, digits and any of . _ ~ : @ + -", "user"
        )


class _Guard:
    """Rejects requests before their body is read: of other hosts, without the key, too large, or of another type.

    A page in a browser can send requests to this machine. They have the page's own name in the Host header (DNS
    rebinding), or, without the permission that CORS asks for, no JSON content type.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, hosts: Collection[str]) -> None:
        self._app = app
        self._api_key = api_key
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        error = self._error(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        answer = self._app if error is None else error.response()
        await answer(scope, receive, send)

    def _error(self, method: str, headers: Headers) -> _ApiError | None:
        """Returns why a request is rejected, or None."""
        host = headers.get("host", "")
        if self._hosts and _name_of(host) not in self._hosts:
            return _ApiError(400, f"The Host header {host!r} is not a name of this machine's loopback address.")
        if self._api_key is not None and not self._has_key(headers.get("authorization", "")):
            message = "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
            return _ApiError(401, message, code="invalid_api_key")
        if "transfer-encoding" in headers:
            return _ApiError(411, "Send the body with a Content-Length.")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            return _ApiError(413, f"Content-Length must be an int up to {_MAX_BODY_BYTES}, got {length[:20]!r}.")
        if method == "POST" and headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            return _ApiError(415, "Send a JSON object with Content-Type: application/json.")
        return None

    def _has_key(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        is_right = secrets.compare_digest(key.strip().encode(), str(self._api_key).encode())
        return scheme.lower() == "bearer" and is_right


def _name_of(host: str) -> str | None:
    """Returns the name or address in a Host header, without its port; None if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    return _as_api_error(error).response()


def _json_number(value: Any) -> float | None:
    """Returns a statistic as a JSON number; NaN and infinities become null."""
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
        try:
            completions = await _unless_disconnected(request, self._completions())
        finally:
            self._cancel()
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

    async def _completions(self) -> list[Completion]:
        """Returns the completed calls."""
        for call in self._calls:
            self._worker.submit(call)
        return await asyncio.gather(*(asyncio.wrap_future(call.completion) for call in self._calls))

    def _cancel(self) -> None:
        for call in self._calls:
            call.is_cancelled = True

    def _recorded(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Returns episode and turns of recorded replies, an extension of OpenAI's API; empty otherwise."""
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


async def _unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """Returns the result of some work, which is cancelled if the client leaves before.

    Raises:
        _ApiError: The client has left; nobody reads the answer.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    tasks: list[asyncio.Future[Any]] = [working, leaving]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _ApiError(499, "The client has left.")
        return working.result()
    finally:
        for task in tasks:
            task.cancel()


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
