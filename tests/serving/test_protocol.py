"""The API answers as OpenAI's does, also to requests that are wrong."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import llamagym
from llamagym.agent.agent import collector_of
from llamagym.errors import ConfigError
from llamagym.policy.sampling import SampledText
from llamagym.serving import ChatAgent
from tests.helpers.agents import make_agent
from tests.helpers.serving import Client, openai, served
from tests.helpers.tools import TOOLS


class Scripted:
    """A sampler that writes one reply to every prompt."""

    activates_lora = True

    def __init__(self, agent, text: str) -> None:
        ids = agent.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.reply = SampledText((*ids, agent.tokenizer.eos_token_id), (-0.1,) * (len(ids) + 1), "eos")

    def set_weights(self, model, weights_id) -> None:
        pass

    def sample(self, prompts, config, eos_ids, rng) -> list[SampledText]:
        return [self.reply] * len(prompts)


@pytest.fixture(scope="module")
def client():
    """A client of an agent in evaluation mode, which samples."""
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 8})
    agent.eval(greedy=False)
    with served(agent) as made:
        yield made


@pytest.fixture(scope="module")
def greedy():
    """A client of an agent in evaluation mode, which takes the most likely tokens."""
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 8})
    agent.eval()
    with served(agent) as made:
        yield made


USER = {"role": "user", "content": "hi"}
DEEP: dict = {}
for _ in range(900):
    DEEP = {"properties": DEEP}
CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
NAN_CALL = {"name": "find", "arguments": {"x": float("nan")}}
# Changes to a valid request; each must be rejected.
WRONG = {
    "no messages": {"messages": []},
    "calls with NaN": {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"x": float("nan")}}}]},
        ]
    },
    "messages missing": {"messages": None},
    "messages a string": {"messages": "hi"},
    "message a string": {"messages": ["hi"]},
    "message without role": {"messages": [{"content": "hi"}]},
    "unknown role": {"messages": [{"role": "robot", "content": "hi"}]},
    "role a number": {"messages": [{"role": 1, "content": "hi"}]},
    "content missing": {"messages": [{"role": "user"}]},
    "content null": {"messages": [{"role": "user", "content": None}]},
    "content a number": {"messages": [{"role": "user", "content": 3}]},
    "content an object": {"messages": [{"role": "user", "content": {"text": "hi"}}]},
    "content an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "content part without text": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    "lone surrogate": {"messages": [{"role": "user", "content": "\ud800"}]},
    "reply without content": {"messages": [USER, {"role": "assistant"}]},
    "calls of a user": {"messages": [USER | {"tool_calls": [CALL]}]},
    "call without function": {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
    "call of another type": {"messages": [USER, {"role": "assistant", "tool_calls": [CALL | {"type": "x"}]}]},
    "call without name": {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
    "too long": {"messages": [{"role": "user", "content": "long " * 1000}]},
    "n zero": {"n": 0},
    "n negative": {"n": -1},
    "n huge": {"n": 10**6},
    "n a fraction": {"n": 1.5},
    "n a string": {"n": "2"},
    "max_tokens zero": {"max_tokens": 0},
    "max_tokens negative": {"max_tokens": -5},
    "max_tokens a string": {"max_tokens": "many"},
    "max_tokens true": {"max_tokens": True},
    "max_tokens beyond the context": {"max_tokens": 100_000},
    "max_completion_tokens zero": {"max_completion_tokens": 0},
    "temperature negative": {"temperature": -0.1},
    "temperature a string": {"temperature": "hot"},
    "temperature nan": {"temperature": float("nan")},
    "temperature infinite": {"temperature": float("inf")},
    "top_p zero": {"top_p": 0},
    "top_p above 1": {"top_p": 1.5},
    "stop a number": {"stop": 5},
    "stop of numbers": {"stop": [1]},
    "stops too many": {"stop": ["x"] * 100},
    "stream a string": {"stream": "yes"},
    "stream_options a list": {"stream_options": []},
    "logprobs a number": {"logprobs": 5},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "tools an object": {"tools": {}},
    "tool without function": {"tools": [{"type": "function"}]},
    "tool of another type": {"tools": [TOOLS[0] | {"type": "code_interpreter"}]},
    "tool without name": {"tools": [{"type": "function", "function": {"description": "x"}}]},
    "tool named by a control token": {"tools": [{"type": "function", "function": {"name": "<|eot_id|>"}}]},
    "tool nested too deeply": {"tools": [{"type": "function", "function": {"name": "x", "parameters": DEEP}}]},
    "tool with a lone surrogate": {"tools": [{"type": "function", "function": {"name": "x", "description": "\udfff"}}]},
    "tool_choice unknown": {"tools": TOOLS, "tool_choice": "sometimes"},
    "tool_choice of no tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
    "tool_choice without tools": {"tool_choice": "required"},
    "JSON format": {"response_format": {"type": "json_object"}},
    "frequency penalty": {"frequency_penalty": 0.5},
    "logit bias": {"logit_bias": {"5": 1}},
    "misspelled field": {"max_token": 5},
    "user a number": {"user": 5},
}
BODIES = {
    "empty": b"",
    "no JSON": b"hello",
    "truncated": b'{"messages": [',
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "not UTF-8": b'{"messages": "\xff"}',
    "deep": b"[" * 100_000,
}


def post(client: Client, content: bytes, **headers: str) -> httpx.Response:
    sent = {"Content-Type": "application/json", **headers}
    return httpx.post(f"{client.url}/chat/completions", content=content, headers=sent, timeout=60)


def assert_rejected(response: httpx.Response, status: int = 400) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_wrong_request_gets_an_error_in_openais_shape(client, change, streamed):
    body = {"model": "any", "messages": [USER], "stream": streamed, **change}
    assert_rejected(post(client, json.dumps(body).encode()))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_wrong_body_gets_an_error_in_openais_shape(client, body):
    assert_rejected(post(client, body))


@pytest.mark.parametrize("episode", ["x" * 1000, "a/b", "..", "a b", "é", "\n"])
def test_rejects_episode_id_that_no_address_can_hold(episode, client):
    body = {"messages": [USER], "user": episode}
    # An agent that does not learn has no use for it.
    assert client.post("/chat/completions", body).status_code == 200
    with served() as learning:
        assert_rejected(learning.post("/chat/completions", body))


def test_errors_of_other_addresses_have_openais_shape(client):
    assert_rejected(httpx.get(f"{client.url}/nothing"), 404)
    assert_rejected(httpx.get(f"{client.url}/chat/completions"), 405)
    assert_rejected(client.post("/episodes/unknown/reward", {"reward": 1}), 404)
    assert_rejected(client.post("/episodes/unknown/reward", {"rewards": 1}), 400)


def test_too_large_or_unannounced_body_is_not_read(client):
    assert_rejected(post(client, b" " * (16 * 2**20 + 1)), 413)
    response = httpx.post(f"{client.url}/chat/completions", content=iter([b"{}"]))
    assert_rejected(response, 411)


def test_long_history_names_the_context_length(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat([{"role": "user", "content": "long " * 1000}])
    assert caught.value.code == "context_length_exceeded"


def test_ignores_neutral_fields(client):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "response_format": {"type": "text"}, "seed": 3}
    assert client.chat(**neutral).choices
    assert client.chat(extra_body={"logit_bias": None, "metadata": {"a": "b"}, "store": False}).choices


def test_key_is_required_if_there_is_one():
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 4})
    agent.eval()
    with served(agent, api_key="secret") as client:
        assert client.chat().choices
        assert httpx.get(f"{client.url}/models", headers={"Authorization": "bearer secret"}).status_code == 200
        for key in ("wrong", "secret2", "sécret"):
            response = client.post(
                "/chat/completions", {"messages": [USER]}, headers={b"Authorization": f"Bearer {key}".encode()}
            )
            assert_rejected(response, 401)
        assert_rejected(httpx.get(f"{client.url}/models"), 401)
        # The key is checked before the body is read.
        assert_rejected(post(client, b"{"), 401)


@pytest.mark.parametrize("key", ["", " x ", "sécret", "a b"])
def test_key_that_no_header_can_hold_is_rejected(key):
    with pytest.raises(ConfigError, match="api_key"), llamagym.serve(make_agent(ChatAgent), api_key=key):
        pass


def test_pages_in_a_browser_cannot_use_the_server(client):
    """They send a Host header of their own name, or no content type that needs permission."""
    for host in ("evil.example", "evil.example:80", "", "[", "127.0.0.1.evil.example"):
        assert_rejected(post(client, b"{}", Host=host))
    for host in ("localhost", "localhost:80", "127.0.0.1", "[::1]:80"):
        assert httpx.get(f"{client.url}/models", headers={"Host": host}).status_code == 200
    body = json.dumps({"messages": [USER]}).encode()
    for sent in ({"Content-Type": "text/plain"}, {}):
        assert_rejected(httpx.post(f"{client.url}/chat/completions", content=body, headers=sent), 415)
    assert post(client, body, **{"Content-Type": "application/json; charset=utf-8"}).status_code == 200


def test_other_loopback_addresses_can_be_chosen():
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 2})
    agent.eval()
    for host in ("127.0.0.2", "::1", "localhost"):
        with served(agent, host=host) as client:
            assert client.chat().choices
            assert_rejected(post(client, b"{}", Host="evil.example"))


def test_listens_on_loopback_only(client):
    port = int(client.url.rsplit(":", 1)[1].split("/")[0])
    own_address = "127.0.0.2"
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect((own_address, port))


def test_address_in_use_is_named():
    agent = make_agent(ChatAgent)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"), llamagym.serve(agent, port=port):
            pass


@pytest.mark.parametrize("arguments", [{"port": -1}, {"port": 70_000}, {"port": "x"}, {"host": "no.such.host.invalid"}])
def test_wrong_address_is_named(arguments):
    (name,) = arguments
    with pytest.raises(ConfigError, match=name), llamagym.serve(make_agent(ChatAgent), **arguments):
        pass


def test_only_agents_are_served():
    with pytest.raises(ConfigError, match="agent must be an Agent"), llamagym.serve("agent"):
        pass


def test_models_are_listed(client):
    (model,) = client.openai.models.list().data
    assert model.owned_by == "llamagym"
    assert client.chat().model == model.id


def test_greedy_reply_is_the_agents(greedy):
    """The same messages reach the model as in an environment."""
    agent = greedy.agent
    reply = greedy.chat([{"role": "user", "content": "Observation 3"}]).choices[0]
    assert reply.message.content == agent.act("Observation 3")
    collector_of(agent).actor.discard_episodes([0])


def test_temperature_zero_is_greedy_and_others_sample(client, greedy):
    likeliest = greedy.chat().choices[0].message.content
    assert client.chat(temperature=0).choices[0].message.content == likeliest
    assert greedy.chat(temperature=0).choices[0].message.content == likeliest
    assert client.chat(temperature=1e-40).choices[0].message.content == likeliest
    assert len({choice.message.content for choice in client.chat(temperature=1.0, n=16).choices}) > 1
    assert {choice.message.content for choice in client.chat(top_p=1e-6, n=4).choices} == {likeliest}


def test_logprobs_are_returned_on_request(client):
    choice = client.chat(logprobs=True, temperature=0).choices[0]
    assert len(choice.logprobs.content) == client.chat(temperature=0).usage.completion_tokens
    assert all(token.logprob <= 0 for token in choice.logprobs.content)
    assert client.chat().choices[0].logprobs is None


def test_max_tokens_ends_a_reply(client):
    for options in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 9, "max_completion_tokens": 3}):
        reply = client.chat(**options)
        assert reply.usage.completion_tokens <= 3
        assert reply.choices[0].finish_reason in ("length", "stop")
    lengths = [client.chat(max_tokens=20).usage.completion_tokens for _ in range(5)]
    assert max(lengths) == 20


def test_content_may_come_in_parts(greedy):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    whole = greedy.chat([{"role": "user", "content": "one\ntwo"}]).choices[0].message.content
    assert greedy.chat([{"role": "user", "content": parts}]).choices[0].message.content == whole


def streamed(client: Client, **options) -> tuple[str, list]:
    chunks = list(client.chat(stream=True, **options))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    return "".join(pieces), chunks


def test_stream_has_the_same_text(greedy):
    text, chunks = streamed(greedy, stream_options={"include_usage": True})
    whole = greedy.chat()
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("streams", [False, True])
def test_reply_ends_before_a_stop_text(greedy, streams):
    whole = greedy.chat(max_tokens=30).choices[0].message.content
    # A text of two characters whose first one occurs elsewhere too, if possible.
    for start in range(len(whole) - 2):
        stop = whole[start : start + 2]
        expected = whole[: whole.index(stop)]
        if "\ufffd" in stop:
            continue
        if streams:
            text, chunks = streamed(greedy, stop=[stop], max_tokens=30)
            reason = chunks[-1].choices[0].finish_reason
        else:
            choice = greedy.chat(stop=stop, max_tokens=30).choices[0]
            text, reason = choice.message.content, choice.finish_reason
        assert text == expected
        assert reason == "stop"


def test_stream_of_text_and_calls_has_the_same_content():
    """The text around a call is sent without the white space between them."""
    reply = 'Hello there.\n\n<tool_call>{"name": "find", "arguments": {"name": "Anna"}}</tool_call>\nBye now.'
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 200})
    agent.eval()
    agent.sampler = Scripted(agent, reply)
    with served(agent) as client:
        message = client.chat(tools=TOOLS).choices[0].message
        assert message.content == "Hello there. Bye now."
        assert message.tool_calls[0].function.arguments == '{"name": "Anna"}'
        text, chunks = streamed(client, tools=TOOLS)
        assert text == message.content
        (calls,) = [chunk.choices[0].delta.tool_calls for chunk in chunks if chunk.choices[0].delta.tool_calls]
        assert calls[0].function.name == "find"
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_several_replies_stream_side_by_side(greedy):
    chunks = list(greedy.chat(stream=True, n=3))
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(texts) == {greedy.chat().choices[0].message.content}


def test_required_call_begins_with_the_tools_name(greedy):
    for choice, begins in (
        ("required", '<tool_call>\n{"name": "'),
        ({"type": "function", "function": {"name": "find"}}, '<tool_call>\n{"name": "find'),
    ):
        reply = greedy.chat(tools=TOOLS, tool_choice=choice).choices[0]
        assert reply.message.content.startswith(begins)
        # A reply that is no call is shown as it is, also in a stream.
        text, _ = streamed(greedy, tools=TOOLS, tool_choice=choice)
        assert text == reply.message.content


def test_client_that_leaves_stops_its_reply_and_is_not_recorded():
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 400}, ppo={"batch_size": 1000})
    with served(agent) as client:
        body = json.dumps({"messages": [USER], "user": "a"}).encode()
        stream = {"messages": [USER], "user": "b", "stream": True}
        # Nothing is sent of a reply that must call a tool, until it is complete.
        forced = stream | {"user": "d", "tools": TOOLS, "tool_choice": "required"}
        bodies = [body, json.dumps(stream).encode(), json.dumps(forced).encode()]
        host, port = client.url.split("/")[2].split(":")
        for sent in bodies:
            with socket.create_connection((host, int(port))) as connection:
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
                connection.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
                # Until the reply is being written.
                time.sleep(0.1)
        forwarded = agent.policy.tokens_forwarded
        # A later call is answered: the replies before it are not written to their end.
        client.chat(user="c", max_tokens=1)
        assert agent.policy.tokens_forwarded - forwarded < 600
        for episode in ("a", "b", "d"):
            assert client.post(f"/episodes/{episode}/end").status_code == 404
        client.end("c")


def test_server_that_closes_answers_what_it_has_begun():
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 100})
    agent.eval(greedy=False)
    statuses = []
    threads_before = threading.active_count()
    with served(agent) as client:

        def ask() -> None:
            try:
                statuses.append(client.post("/chat/completions", {"messages": [USER]}).status_code)
            except httpx.HTTPError as error:
                statuses.append(type(error).__name__)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 503, "ConnectError", "ReadError", "RemoteProtocolError"}
    assert threading.active_count() == threads_before


def test_end_of_an_episode_is_answered_before_the_server_closes(monkeypatch):
    """Its update has changed the agent, so the client must not see an error."""
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 2})
    update = agent.learner.update
    is_updating = threading.Event()

    def slow_update(batch):
        is_updating.set()
        time.sleep(1)
        return update(batch)

    monkeypatch.setattr(agent.learner, "update", slow_update)
    with ThreadPoolExecutor(1) as pool:
        with served(agent) as client:
            client.chat(user="a", n=4)
            ended = pool.submit(client.post, "/episodes/a/end", {"reward": 1.0})
            assert is_updating.wait(60)
        assert ended.result().status_code == 200
        assert ended.result().json()["update"]["turns"] == 4


def test_server_that_does_not_start_raises_and_frees_its_port(monkeypatch):
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threads_before = threading.active_count()
    for _ in range(2):
        with pytest.raises(ConfigError, match="did not start"), llamagym.serve(make_agent(ChatAgent), port=port):
            pass
    assert threading.active_count() == threads_before


def load(client: Client, clients: int, calls: int) -> None:
    """Plays episodes of two turns in many clients at once; checks that each call gets its own answer."""
    agent = client.agent
    tokenizer = agent.tokenizer

    def play(number: int) -> None:
        name = f"episode-{number}"
        messages = [{"role": "user", "content": name}]
        for turn in range(2):
            reply = client.chat(messages, user=name)
            assert reply.model_extra["episode"] == {"id": name, "turns": [turn]}
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": f"{name} again"})
        client.end(name, reward=number)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(play, range(calls // 2)))
    episodes = collector_of(agent).buffer
    assert len(episodes) == calls // 2
    for episode in episodes:
        first, second = (tokenizer.decode(turn.prompt.ids) for turn in episode.turns)
        name = f"episode-{int(episode.total_reward)}"
        assert name in first
        assert f"{name} again" in second


@pytest.mark.parametrize(("clients", "calls"), [(16, 200), pytest.param(64, 10_000, marks=pytest.mark.long)])
def test_no_call_is_lost_or_mixed_up(clients, calls):
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 3}, ppo={"batch_size": 10**6})
    with served(agent) as client:
        load(client, clients, calls)
