"""Calls through the API become episodes of exactly the tokens that the model saw, and train the agent."""

import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import llamagym
from llamagym.agent.agent import collector_of
from llamagym.serving import ChatAgent
from llamagym.text.episode import segments_of
from tests.helpers.agents import make_agent
from tests.helpers.serving import Client, served
from tests.helpers.tools import TOOLS


def buffered(client: Client):
    """The finished episodes that await an update."""
    return collector_of(client.agent).buffer


def large_batch(**options):
    """An agent whose batch is not filled by a test."""
    return make_agent(ChatAgent, generate={"max_new_tokens": 8}, ppo={"batch_size": 1000}, **options)


def play(client: Client, episode: str, turns: int = 3):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Start."}]
    for turn in range(turns):
        client.say(messages, user=episode)
        messages.append({"role": "user", "content": f"Turn {turn}."})
    return messages


def test_history_that_continues_a_reply_appends_to_its_context():
    with served(large_batch()) as client:
        messages = play(client, "a")
        client.end("a", reward=1.0)
        (episode,) = buffered(client)
        (segment,) = segments_of([episode])
        tokenizer = client.agent.tokenizer
        shown = []
        for turn in segment.turns:
            shown += [*turn.prompt.ids, *turn.reply.ids]
        assert [turn.prompt.starts_context for turn in segment.turns] == [True, False, False]
        assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 1.0]
        # A byte-level tokenizer without merges encodes the whole text as it encodes its parts.
        rendered = tokenizer.apply_chat_template(messages[:-1], tokenize=False)
        assert tokenizer.decode(shown).replace("<|eot_id|>", "") == rendered.replace("<|eot_id|>", "")


def test_recorded_turns_have_the_probabilities_that_are_trained():
    with served() as client:
        for number in range(2):
            play(client, f"e{number}", turns=2)
            client.end(f"e{number}", reward=number)
        (stats,) = client.updates
        assert stats["ratio_error"] < 1e-4
        assert stats["turns"] == 4


def test_other_history_starts_a_context_of_its_own():
    with served(large_batch()) as client:
        play(client, "a", turns=2)
        # The client has dropped the first exchange.
        client.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Turn 0."}], user="a")
        client.end("a")
        (episode,) = buffered(client)
        assert [turn.prompt.starts_context for turn in episode.turns] == [True, False, True]


def test_contexts_may_alternate_within_an_episode():
    with served() as client:
        first = [{"role": "user", "content": "First."}]
        second = [{"role": "user", "content": "Second."}]
        for _ in range(2):
            for messages in (first, second):
                client.say(messages, user="a")
                messages.append({"role": "user", "content": "Go on."})
        client.end("a", reward=1.0)
        (stats,) = client.updates
        assert stats["turns"] == 4
        # The second turns start their contexts again, with the same tokens.
        assert stats["ratio_error"] < 1e-4


def test_several_replies_to_one_history_are_turns_of_their_own():
    with served() as client:
        reply = client.chat(user="a", n=4)
        assert reply.model_extra["episode"] == {"id": "a", "turns": [0, 1, 2, 3]}
        client.reward("a", 1.0, turn=2)
        client.end("a")
        (stats,) = client.updates
        assert stats["return_mean"] == 1.0
        assert stats["ratio_error"] < 1e-4


def test_required_calls_continue_their_context():
    with served(large_batch()) as client:
        messages = [{"role": "user", "content": "Where does Anna live?"}]
        for _ in range(2):
            choice = client.chat(messages, user="a", tools=TOOLS, tool_choice="required").choices[0]
            messages.append(choice.message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "Again."})
        client.end("a")
        (episode,) = buffered(client)
        assert [turn.prompt.starts_context for turn in episode.turns] == [True, False]
        opening = client.agent.tokenizer.decode(episode.turns[0].prompt.ids[-episode.turns[0].prompt.opening_length :])
        assert opening.endswith('<tool_call>\n{"name": "')


def test_rewards_go_to_their_turns():
    with served(large_batch()) as client:
        play(client, "a")
        client.reward("a", 0.5, turn=0)
        client.reward("a", 0.25, turn=0)
        client.reward("a", -1)
        client.end("a", reward=2)
        (episode,) = buffered(client)
        assert [turn.reward for turn in episode.turns] == [0.75, 0.0, 1.0]
        assert episode.terminated


@pytest.mark.parametrize("reward", ["x", None, True, [1], float("nan"), 1e300])
def test_invalid_reward_is_rejected_and_changes_nothing(reward):
    with served(large_batch()) as client:
        play(client, "a", turns=1)
        content = f'{{"reward": {reward!r}}}'.replace("'", '"').replace("True", "true").replace("None", "null")
        headers = {"Content-Type": "application/json"}
        for path in ("reward", "end"):
            if path == "end" and reward is None:
                continue
            response = httpx.post(
                f"{client.url}/episodes/a/{path}", content=content.replace("nan", "NaN"), headers=headers
            )
            assert response.status_code == 400, response.text
            assert response.json()["error"]["message"]
        client.end("a")
        assert buffered(client)[0].total_reward == 0.0


def test_logprobs_of_the_api_are_the_recorded_ones():
    with served(large_batch()) as client:
        tokens = client.chat(user="a", logprobs=True).choices[0].logprobs.content
        client.end("a")
        (turn,) = buffered(client)[0].turns
        assert [token.logprob for token in tokens] == list(turn.reply.logprobs)


def test_truncated_episode_is_valued_at_its_last_history():
    with served(large_batch()) as client:
        messages = play(client, "a", turns=2)
        response = client.post("/episodes/a/end", {"truncated": True})
        assert response.status_code == 400
        assert "the next call would have sent" in response.json()["error"]["message"]
        client.end("a", truncated=True, messages=messages)
        (episode,) = buffered(client)
        assert episode.truncated
        segment = episode.final_segment()
        assert len(segment.turns) == 2
        assert client.agent.tokenizer.decode(segment.pending.ids).count("Turn 1.") == 1


def test_final_history_must_fit_the_model():
    """Otherwise every later update would fail because of this episode."""
    with served() as client:
        messages = play(client, "a", turns=1)
        messages.append({"role": "user", "content": "long " * 1000})
        response = client.post("/episodes/a/end", {"truncated": True, "messages": messages})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        client.end("a", truncated=True, messages=messages[-3:-1])
        play(client, "b", turns=3)
        assert client.end("b")["turns"] == 4


def test_failing_callback_stops_nothing(caplog):
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 4})
    with llamagym.serve(agent, on_update=lambda _: sys.exit()) as url:
        client = Client(agent, url, [])
        for _ in range(2):
            client.chat(user="a", n=4)
            assert client.end("a")["turns"] == 4
        client.openai.close()
    assert caplog.text.count("on_update failed") == 2


def test_failed_update_is_an_error_of_the_end_and_can_be_repeated(monkeypatch):
    with served() as client:
        client.chat(user="a", n=4)
        with monkeypatch.context() as patch:
            patch.setattr(client.agent.learner, "update", lambda batch: 1 / 0)
            response = client.post("/episodes/a/end", {"reward": 1.0})
            assert response.status_code == 500
            assert "ZeroDivisionError" in response.json()["error"]["message"]
        assert client.end("a", reward=2.0)["return_mean"] == 2.0


def test_mode_decides_at_the_time_of_the_call():
    with served() as client:
        client.chat(user="a")
        client.agent.eval()
        # As with environments, an episode that ends in evaluation mode is not learned from.
        assert client.end("a") is None
        assert not buffered(client)
        client.chat(user="b")
        client.agent.train()
        assert client.post("/episodes/b/end").status_code == 404


def test_least_recently_used_episode_is_deleted(monkeypatch, caplog):
    monkeypatch.setattr("llamagym.serving.worker._MAX_EPISODES", 3)
    with served(large_batch()) as client:
        for name in ("a", "b", "c", "a", "d"):
            client.chat(user=name)
        assert "'b'" in caplog.text
        assert client.post("/episodes/b/end").status_code == 404
        client.end("a")
        assert len(buffered(client)[0].turns) == 2


def test_groups_reach_grpo():
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 4}, algorithm="grpo", grpo={"group_size": 2})
    with served(agent) as client:
        for number in range(4):
            play(client, f"e{number}", turns=1)
            client.end(f"e{number}", reward=float(number), group=number // 2)
        assert len(client.updates) == 1
        assert client.updates[0]["ratio_error"] < 1e-4


def test_evaluation_mode_records_nothing():
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 8})
    agent.eval()
    with served(agent) as client:
        # Without an episode's id, and greedy: equal calls have equal replies.
        replies = {client.chat().choices[0].message.content for _ in range(2)}
        assert len(replies) == 1
        assert client.chat(user="a").model_extra.get("episode") is None
        response = client.post("/episodes/a/end")
        assert response.status_code == 404
        assert "evaluation mode" in response.json()["error"]["message"]


def test_rejects_call_without_episode_while_learning():
    with served() as client:
        response = client.post("/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "user"


@pytest.mark.parametrize("way", ["field", "X-Episode-Id", "X-Session-ID", "address"])
def test_episode_is_named_in_several_ways(way):
    with served(large_batch()) as client:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        path = "/chat/completions"
        headers = {}
        if way == "field":
            body["user"] = "a"
        elif way == "address":
            path = "/episodes/a/chat/completions"
        else:
            headers = {way: "a"}
        assert client.post(path, body, headers=headers).json()["episode"] == {"id": "a", "turns": [0]}
        client.end("a")
        assert len(buffered(client)) == 1


def test_deleted_episode_is_not_learned_from():
    with served(large_batch()) as client:
        play(client, "a", turns=1)
        assert httpx.delete(f"{client.url}/episodes/a").json()["deleted"]
        assert httpx.delete(f"{client.url}/episodes/a").status_code == 404
        assert client.post("/episodes/a/end").status_code == 404
        assert not buffered(client)


def test_served_agent_learns_from_rewards():
    """Rewards the share of ASCII characters; a constant reward is the negative control."""

    def share(text: str) -> float:
        return sum(map(str.isascii, text)) / max(1, len(text))

    def trained(reward) -> float:
        learner = {"batch_size": 48, "mini_batch_size": 12, "learning_rate": 0.1}
        agent = make_agent(ChatAgent, generate={"max_new_tokens": 1}, ppo=learner)
        with served(agent) as client, ThreadPoolExecutor(16) as clients:

            def play_one(number: int) -> float:
                text = client.chat(user=str(number)).choices[0].message.content
                client.end(str(number), reward=reward(text))
                return share(text)

            shares = list(clients.map(play_one, range(8 * 48)))
            assert len(client.updates) == 8
            return sum(shares[-144:]) / 144

    assert trained(share) > trained(lambda _: 1.0) + 0.1
