"""Probabilities of choices: token by token against the model's own forward pass, among what the choices allow."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from llamagym.engine.choice_trie import END, Branch, ChoiceTrie, Ids, branch_points
from llamagym.engine.token_tree import Decision, TokenTree
from llamagym.policy.calibration import Calibration, Repetition, Row
from llamagym.text.chat_template import end_ids
from llamagym.text.episode import Prompt, Reply
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.helpers.tiny import FAMILIES
from tests.policy.test_invariants import plain_logprobs

# Of log-probabilities: of sums over up to 35 tokens, computed in another order.
TOLERANCE = 1e-3
# One word and many, short and long, some beginning alike or wholly contained in another; offers of different size.
OFFERS = {
    "a": ["go", "go left", "take the old lantern from the shelf", "inventory"],
    "bb": ["go", "examine lantern"],
    "ccc": ["take the old lantern", "take the old lantern from the shelf", "x", "y", "open box"],
    "dddd": ["wait"],
}
# As a text world offers them.
MANY = [f"{verb} {thing}" for verb in ("take", "drop", "open the") for thing in map(str, range(100))]


# Observations with the same four choices, which begin otherwise.
WORDS = ["up", "down", "north", "red", "seven", "open", "cold", "tree", "what", "river", "and"]


class OfferAgent(WordAgent):
    """Offers what the observation names."""

    def get_action_choices(self, observation):
        return MANY if observation == "many" else OFFERS.get(observation, ["a", "go", "take it", "wait"])


def encoded(agent, observation):
    """Token ids of each choice."""
    return [
        tuple(agent.tokenizer(choice, add_special_tokens=False)["input_ids"])
        for choice in agent.get_action_choices(observation)
    ]


def at_its_start(agent):
    """The agent as a fresh adapter leaves it."""
    with torch.no_grad():
        for name, weight in agent.policy.model.named_parameters():
            if "lora_B" in name:
                weight.zero_()
    return agent


class Model:
    """Next-token log-probabilities of the bare model after an observation's prompt, one forward pass per prefix."""

    def __init__(self, agent, observation):
        self._agent = agent
        self._prompt = actor_of(agent).chat_template.first_prompt("Say something.", f"Observation {observation}")
        self._known = {}

    def logprob(self, path, token):
        """Of a token, or of the reply's end, among all tokens."""
        if path not in self._known:
            ids = [*self._prompt, *path]
            self._known[path] = plain_logprobs(self._agent, [*ids, 0], len(self._prompt) - 1)[len(ids) - 1]
        agent = self._agent
        closing = actor_of(agent).chat_template.closing_id(
            end_ids(agent.policy.model.pretrained_model, agent.tokenizer)
        )
        return self._known[path][closing if token == END else token].item()


def slow_logprobs(agent, observation, temperature=1.0, prior=None):
    """Log-probability of each choice: at each of its tokens a softmax over those that some choice goes on with."""
    model, written = Model(agent, observation), [(*ids, END) for ids in encoded(agent, observation)]
    logprobs = []
    for ids in written:
        total = 0.0
        for at, token in enumerate(ids):
            following = [other[at] for other in written if other[:at] == ids[:at]]
            if len(set(following)) == 1:
                continue
            logits = {}
            for each in set(following):
                less = prior[(*ids[:at], each)] if prior else 0.0
                count = following.count(each) if prior else 1
                logits[each] = (model.logprob(ids[:at], each) - less) / temperature + math.log(count)
            total += logits[token] - torch.tensor(list(logits.values())).logsumexp(0).item()
        logprobs.append(total)
    return logprobs


def log_probabilities(agent, observations):
    """The policy's log-probabilities of the choices of each observation, computed in one batch."""
    contexts = [
        actor_of(agent)
        .new_conversation()
        .observe(f"Observation {observation}", choices=agent.get_action_choices(observation))
        for observation in observations
    ]
    agent.policy.calibrate(contexts)
    return agent.policy.choice_logprobs(contexts)


@pytest.mark.numerical
@pytest.mark.equivalence
@pytest.mark.pairwise(family=FAMILIES, calibrate=[True, False], activated=[True, False])
def test_choices_are_written_token_by_token(family, calibrate, activated):
    agent = make_agent(OfferAgent, family, activated, calibrate_choices=calibrate, generate={"temperature": 1.3})
    for observation, logprobs in zip(OFFERS, log_probabilities(agent, OFFERS), strict=True):
        prior = agent.policy.calibration.prior if calibrate else None
        assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
        assert logprobs.tolist() == pytest.approx(slow_logprobs(agent, observation, 1.3, prior), abs=TOLERANCE)


@pytest.mark.equivalence
def test_hundreds_of_choices_in_a_batch_with_few():
    agent = make_agent(OfferAgent, calibrate_choices=False, context="turn")
    assert len(MANY) == 300
    for observation, logprobs in zip(("many", "bb"), log_probabilities(agent, ["many", "bb"]), strict=True):
        assert logprobs.tolist() == pytest.approx(slow_logprobs(agent, observation), abs=TOLERANCE)


def usual(agent, observations):
    """How likely the model without adapter finds each token where choices part, a row for each such place."""
    rows = []
    with agent.policy.model.pretrained_model.disable_adapter():
        for observation in observations:
            model, written = Model(agent, observation), [(*ids, END) for ids in encoded(agent, observation)]
            for path in {ids[:at] for ids in written for at in range(len(ids))}:
                following = {ids[len(path)] for ids in written if ids[: len(path)] == path}
                if len(following) > 1:
                    found = torch.tensor([model.logprob(path, token) for token in following])
                    mean = found.logsumexp(0).item() - math.log(len(found))
                    rows.append({(*path, token): model.logprob(path, token) - mean for token in following})
    return rows


def prior_of(rows):
    """The mean over the rows that hold each."""
    paths = {path for row in rows for path in row}
    return {path: float(np.mean([row[path] for row in rows if path in row])) for path in paths}


def test_prior_is_the_relative_log_probability_of_each_token():
    agent = make_agent(OfferAgent)
    agent.act_batch(list(OFFERS))
    assert agent.policy.calibration.prior == pytest.approx(prior_of(usual(agent, OFFERS)), abs=1e-3)


def sure_of_itself(**options):
    """An agent whose model is sure of some choice everywhere, of another in each context."""
    agent = at_its_start(make_agent(OfferAgent, context="turn", **options))
    with torch.no_grad():
        agent.policy.model.pretrained_model.get_output_embeddings().weight.mul_(40)
    return agent


def test_an_overconfident_model_still_explores():
    agent = sure_of_itself()
    calibrated = log_probabilities(agent, WORDS)
    rows = usual(agent, WORDS)
    prior, calibration = prior_of(rows), agent.policy.calibration
    differences = [[likelier - prior[path] for path, likelier in row.items()] for row in rows]
    deviation = np.sqrt(np.mean([np.var(row) for row in differences]))
    assert deviation > 3
    assert calibration.deviation == pytest.approx(deviation, rel=1e-3)
    for observation, logprobs in zip(WORDS, calibrated, strict=True):
        wanted = slow_logprobs(agent, observation, calibration.deviation, calibration.prior)
        assert logprobs.tolist() == pytest.approx(wanted, abs=TOLERANCE)
    even = math.log(4)
    sure = log_probabilities(sure_of_itself(calibrate_choices=False), WORDS)
    assert mean_entropy(sure) < even / 4
    assert mean_entropy(calibrated) > even / 2


def mean_entropy(of_contexts):
    """In nats."""
    return float(np.mean([-(logprobs.exp() * logprobs).sum().item() for logprobs in of_contexts]))


def test_calibration_is_measured_again_whenever_contexts_have_doubled():
    agent = sure_of_itself()
    policy, known = agent.policy, []
    for added, again in ((1, True), (1, True), (1, False), (0, False), (3, True), (5, False)):
        before, version = policy.calibration.prior.copy(), policy.weights_version
        now = WORDS[len(known) : len(known) + added]
        # Contexts that were measured are not measured again.
        log_probabilities(agent, [*known, *now])
        known += now
        assert (policy.weights_version != version) == (again and bool(before))
        if again:
            assert policy.calibration.prior == pytest.approx(prior_of(usual(agent, known)), rel=1e-3, abs=1e-3)
        else:
            assert policy.calibration.prior == before


def test_calibration_is_frozen_once_the_policy_learns():
    agent = sure_of_itself(ppo={"batch_size": 2, "mini_batch_size": 2})
    for observation in WORDS[:2]:
        agent.act(observation)
        agent.assign_reward(1.0)
        agent.terminate_episode()
    calibration = agent.policy.calibration
    assert agent.policy.num_updates == 1
    before, deviation = calibration.prior.copy(), calibration.deviation
    log_probabilities(agent, WORDS)
    assert (calibration.prior, calibration.deviation) == (before, deviation)
    # What was never offered before is measured where it is offered first.
    log_probabilities(agent, ["ccc"])
    assert before.items() < calibration.prior.items()
    assert calibration.deviation == deviation


def test_deviation_stays_one_if_the_policy_learned_before():
    agent = sure_of_itself()
    agent.policy.num_updates = 1
    agent.act_batch(WORDS)
    assert agent.policy.calibration.deviation == 1.0
    assert agent.policy.calibration.prior == pytest.approx(prior_of(usual(agent, WORDS)), rel=1e-3, abs=1e-3)


def test_the_sample_includes_contexts_with_equal_probability():
    calibration, choices = Calibration(), ((1,), (2,))
    decision = Decision(0, (9,), (-1,), 0, choices=choices, branches=ChoiceTrie.of(choices).branches)
    measured = 0
    for number in range(4000):
        trees = [TokenTree((2 * number + at,), (), (decision,)) for at in range(2)]
        found = calibration.unmeasured(trees, learns=False)
        assert found == trees or number >= 256
        measured += len(found)
        calibration.add({tree: [[((1,), number / 4000, 0), ((2,), 0.0, 0)]] for tree in found})
        # What was measured, or not, is not measured again.
        assert calibration.unmeasured(trees, learns=False) == []
    # 512 and, of all later ones, the share that the sample had of those before: 512 (1 + ln(8000 / 512)).
    assert measured == pytest.approx(1920, abs=100)
    # The mean of all so far when it was last looked at, at 1.65 times as many a time; the first 512 alone have 0.03.
    assert calibration.prior == {(1,): pytest.approx(0.4, abs=0.13), (2,): 0.0}


def test_choices_first_offered_after_the_sample_is_full_get_a_prior():
    """Before the first update; whether or not their contexts have a place in the sample."""
    calibration, late = Calibration(), {}
    for number in range(2000):
        choices = ((1,), (2,)) if number < 1000 else ((1,), (3 + number,))
        decision = Decision(0, (9,), (-1,), 0, choices=choices, branches=ChoiceTrie.of(choices).branches)
        tree = TokenTree((number,), (), (decision,))
        before = calibration.prior
        changed = calibration.add(
            {
                tree: [[(choices[0], -1.0, 0), (choices[1], 1.0, 0)]]
                for tree in calibration.unmeasured([tree], learns=False)
            }
        )
        assert calibration.prior[choices[1]] == 1.0
        # A choice that is new says nothing of those that were measured.
        assert not changed or any(calibration.prior[path] != before[path] for path in before)
        if number >= 1000:
            late[choices[1]] = 1.0
            assert calibration.unmeasured([tree], learns=False) == []
    assert len(calibration.sample) == 512
    assert late.items() <= calibration.prior.items()
    resumed = Calibration.from_record(json.loads(json.dumps(calibration.record(learns=False))))
    assert (resumed.prior, resumed.measured.keys()) == (calibration.prior, calibration.measured.keys())


def test_processes_agree_on_choices_first_offered_after_the_sample_is_full():
    calibrations = [Calibration() for _ in range(2)]
    for number in range(3000):
        process = calibrations[number % 2]
        choices = ((1,), (2,)) if number < 1500 else ((1,), (3 + number % 7,))
        decision = Decision(0, (9,), (-1,), 0, choices=choices, branches=ChoiceTrie.of(choices).branches)
        fresh = process.unmeasured([TokenTree((number,), (), (decision,))], learns=False)
        row = [(choices[0], number / 3000, number % 3), (choices[1], -number / 3000, 0)]
        process.add({tree: [row] for tree in fresh})
        if number % 100 == 99:
            measured = [dict(each.measured) for each in calibrations]
            for each in calibrations:
                each.agree(measured, learns=False)
            one, other = (each.record(learns=False) for each in calibrations)
            assert all(one[name] == other[name] for name in one if name != "choice_contexts")
            assert one["choice_repetition"][2] == 2
    assert calibrations[0].prior.keys() == {(number,) for number in range(1, 10)}


def test_late_choices_are_measured_like_the_first():
    """An observation that makes all commands likelier than the first ones did leaves a new one where it was."""
    agent = at_its_start(make_agent(OfferAgent, context="turn"))
    first, later = log_probabilities(agent, ["bb"])[0], log_probabilities(agent, ["a"])[0]
    assert first.exp().tolist() == pytest.approx([1 / 2] * 2, rel=1e-3)
    alone = log_probabilities(at_its_start(make_agent(OfferAgent, context="turn")), ["a"])[0]
    assert alone.exp().tolist() == pytest.approx([1 / 4] * 4, rel=1e-3)
    assert later.exp().min() > 1 / 16


def test_logits_equal_to_the_prior_make_choices_equally_likely():
    agent = at_its_start(make_agent(OfferAgent))
    # The prior is measured here, on this context alone.
    (logprobs,) = log_probabilities(agent, ["many"])
    assert logprobs.exp().tolist() == pytest.approx([1 / 300] * 300, rel=1e-3)


@pytest.mark.equivalence
@pytest.mark.pairwise(activated=[True, False])
def test_sampled_log_probabilities_equal_trained_ones(activated):
    ppo = {"batch_size": 8, "mini_batch_size": 8, "ppo_epochs": 1}
    agent = make_agent(OfferAgent, "smollm", activated, ppo=ppo)
    stats = {}
    for observation in [*OFFERS, *OFFERS]:
        agent.act(observation)
        agent.assign_reward(float(len(observation)))
        stats |= agent.terminate_episode()
    assert stats["ratio_error"] < 2e-4
    assert stats["grad_norm"] > 0


def test_entropy_summed_over_branch_points_is_unbiased():
    agent = make_agent(OfferAgent, "llama", context="turn", seed=0)
    (logprobs,) = log_probabilities(agent, ["ccc"])
    exact = -(logprobs.exp() * logprobs).sum().item()
    agent.act_batch(["ccc"] * 400)
    segments = [actor_of(agent).conversation(env).current_segment() for env in range(400)]
    with torch.no_grad():
        along = agent.policy.evaluate(segments).entropy[:, 0]
    assert along.std() > 0.01
    assert along.mean().item() == pytest.approx(exact, abs=4 * along.std().item() / 20)


def test_a_choice_costs_tokens_up_to_its_last_branch_point():
    agent = make_agent(OfferAgent, context="turn")
    agent.act_batch(["many"])
    policy, before = agent.policy, agent.policy.tokens_forwarded
    policy.evaluate([actor_of(agent).conversation(0).current_segment()])
    # The generation prompt's end, and at most "open", " the", " " and a digit.
    assert 0 < policy.tokens_forwarded - before < 20


def test_branch_points_reach_exactly_the_choices():
    choices = ((1, 2, 3), (1, 2), (1, 4, 5, 6), (7, 8), (9,), (1, 4, 5, 7))
    trie = ChoiceTrie.of(choices)
    ways = {}
    for choice in choices:
        ways[choice] = tuple(branch_points(trie.branches, [choice])[0])
        along = trie.path_to(choice)
        assert along.ids == choice[: len(along.ids)]
        assert [target for _, target in branch_points(along.branches, [choice])[0]] == [
            target for _, target in ways[choice]
        ]
        assert all(branch.node == len(branch.path) for branch in along.branches)
    assert len(set(ways.values())) == len(choices)
    paths = {0: ()}
    for node, (token, parent) in enumerate(zip(trie.ids, trie.parents, strict=True), start=1):
        assert parent < node
        paths[node] = (*paths[parent], token)
    for branch in trie.branches:
        assert paths[branch.node] == branch.path
        following = [
            (*choice, END)[len(branch.path)] for choice in choices if choice[: len(branch.path)] == branch.path
        ]
        assert dict(zip(branch.targets, branch.counts, strict=True)) == {t: following.count(t) for t in following}
        assert len(branch.targets) > 1
    # What no branch needs is not read.
    assert sorted(paths.values()) == [(), (1,), (1, 2), (1, 4), (1, 4, 5)]


class Repeater:
    """A language model with a preference of its own that finds likelier what it has replied before."""

    def __init__(self, first: float, per_doubling: float, noise: float = 0.0) -> None:
        self.preference = {(1,): 1.0, (2,): -2.0, (3,): 0.5, (4,): 0.0}
        self.repetition = Repetition(first, per_doubling, largest=100)
        self.noise = noise
        self.rng = np.random.default_rng(0)

    def relative(self, counts: dict[Ids, int]) -> Row:
        """Relative log-probabilities of the paths, of which so many earlier replies were."""
        logits = np.array([self.preference[path] + self.repetition.effect(count) for path, count in counts.items()])
        logits += self.noise * self.rng.standard_normal(len(logits))
        relative = logits - np.logaddexp.reduce(logits) + np.log(len(logits))
        return [(path, float(value), count) for (path, count), value in zip(counts.items(), relative, strict=True)]

    def rows(self, contexts: int) -> list[Row]:
        """Rows of contexts that offer two to four of the choices, with up to four earlier replies."""
        rows = []
        for _ in range(contexts):
            offered = [path for path in self.preference if path < (3,) or self.rng.random() < 0.5]
            rows.append(self.relative({path: int(self.rng.integers(5)) for path in offered}))
        return rows


def calibrated(calibration: Calibration, rows: Sequence[Row], start: int = 0) -> Calibration:
    """Add contexts with these rows."""
    for number, row in enumerate(rows, start):
        tree, branch = context_of(number, tuple(path for path, _, _ in row))
        assert branch.targets == tuple(path[0] for path, _, _ in row)
        if calibration.unmeasured([tree], learns=calibration.is_frozen):
            calibration.add({tree: [row]})
    return calibration


def context_of(number: int, choices: tuple[Ids, ...]) -> tuple[TokenTree, Branch]:
    """A context that offers choices of one token each, and where they part."""
    (branch,) = ChoiceTrie.of(choices).branches
    decision = Decision(0, (9,), (-1,), 0, choices=choices, branches=(branch,))
    return TokenTree((number,), (), (decision,)), branch


def probabilities(calibration: Calibration, row: Row) -> list[float]:
    """Of the targets of a row, with the calibration."""
    _, branch = context_of(0, tuple(path for path, _, _ in row))
    expected = calibration.expected(branch, [count for _, _, count in row])
    scores = (np.array([value for _, value, _ in row]) - expected) / calibration.deviation
    return list(np.exp(scores - np.logaddexp.reduce(scores)))


@pytest.mark.parametrize(("first", "per_doubling"), [(4.0, 3.0), (0.0, 0.0)])
def test_repetition_is_fitted_together_with_preferences(first, per_doubling):
    fitted = Repetition.fit(Repeater(first, per_doubling, noise=0.4).rows(200))
    assert fitted.first == pytest.approx(first, abs=0.2)
    assert fitted.per_doubling == pytest.approx(per_doubling, abs=0.2)
    assert fitted.largest == 4


def test_the_fit_is_exact_where_contexts_offer_different_choices():
    model = Repeater(4.0, 3.0)
    # What is offered depends on what was replied.
    alone = [model.relative({(1,): count, (2,): 0}) for count in (0, 1, 2) for _ in range(100)]
    beside = [model.relative({(1,): count, (2,): 0, (3,): 0}) for count in (2, 4) for _ in range(100)]
    fitted = Repetition.fit([*alone, *beside])
    assert (fitted.first, fitted.per_doubling) == (pytest.approx(4.0, abs=0.02), pytest.approx(3.0, abs=0.02))


def test_the_fit_includes_few_later_turns():
    model = Repeater(4.0, 3.0)
    calibration = calibrated(Calibration(), [model.relative({(1,): 0, (2,): 0}) for _ in range(128)])
    later = model.relative({(1,): 1, (2,): 0})
    calibration.add({context_of(number, ((1,), (2,)))[0]: [later] for number in range(128, 148)})
    assert probabilities(calibration, later) == pytest.approx([0.5, 0.5], abs=0.05)


def test_rows_that_are_not_finite_are_left_out_of_the_fit():
    rows = Repeater(4.0, 3.0).rows(200)
    broken = [((1,), math.nan, 1), ((2,), 0.0, 0)]
    assert Repetition.fit([*rows, broken]) == Repetition.fit(rows)


def test_all_choices_are_equally_likely_whatever_was_replied_before():
    model = Repeater(4.0, 3.0)
    calibration = calibrated(Calibration(), model.rows(400))
    assert calibration.deviation == 1.0
    for counts in ({(1,): 0, (2,): 0}, {(1,): 3, (2,): 0, (4,): 1}, {(1,): 0, (2,): 4, (3,): 2, (4,): 0}):
        even = [1 / len(counts)] * len(counts)
        assert probabilities(calibration, model.relative(counts)) == pytest.approx(even, abs=0.05)
    # More replies than were ever measured count as the most that were.
    (branch,) = ChoiceTrie.of(((1,), (2,))).branches
    assert calibration.expected(branch, (100, 0)) == calibration.expected(branch, (4, 0))


@pytest.mark.parametrize("learns", [True, False], ids=["learns", "before it learns"])
def test_a_calibration_continues_from_its_record(learns):
    rows = Repeater(4.0, 3.0, noise=0.4).rows(300)
    calibration = calibrated(Calibration(), rows[:150])
    resumed = Calibration.from_record(json.loads(json.dumps(calibration.record(learns=learns))))
    for each in (calibration, resumed):
        calibrated(each, rows[150:], start=150)
    assert resumed.record(learns=learns) == calibration.record(learns=learns)
    assert resumed.repetition == calibration.repetition
    copied = calibration.separate_copy()
    assert (copied.repetition, copied.deviation) == (calibration.repetition, calibration.deviation)


def test_late_choices_are_measured_without_repetition():
    model = Repeater(4.0, 3.0)
    early = [row for row in model.rows(600) if all(path < (3,) for path, _, _ in row)]
    calibration = calibrated(Calibration(), early)
    calibration.is_frozen = True
    late = model.relative({(1,): 4, (3,): 0})
    calibrated(calibration, [late], start=10_000)
    for counts in ({(1,): 0, (3,): 0}, {(1,): 4, (3,): 0}, {(1,): 0, (2,): 0, (3,): 1}):
        even = [1 / len(counts)] * len(counts)
        # Relative to others than it was measured beside, a choice has another mean.
        assert probabilities(calibration, model.relative(counts)) == pytest.approx(even, abs=0.15)
    measured_here = calibration.prior[3,]
    calibration.agree([dict(calibration.measured)], learns=True)
    assert calibration.prior[3,] == pytest.approx(measured_here)


def test_processes_agree_on_what_one_would_have_measured():
    rows = Repeater(4.0, 3.0, noise=0.4).rows(300)
    processes = [Calibration() for _ in range(2)]
    for number in range(0, 300, 50):
        for process, half in zip(processes, (rows[number : number + 25], rows[number + 25 : number + 50]), strict=True):
            calibrated(process, half, start=number + 25 * processes.index(process))
        measured = [dict(process.measured) for process in processes]
        for process in processes:
            process.agree(measured, learns=False)
    alone = calibrated(Calibration(), rows)
    alone.agree([dict(alone.measured)], learns=False)
    for process in processes:
        assert process.repetition == alone.repetition
        assert process.prior == alone.prior
        assert process.deviation == alone.deviation


def test_replies_are_those_of_the_turns_that_are_shown():
    agent = make_agent(ChoiceAgent)
    given: list[Ids] = []
    for turn in range(4):
        agent.act(turn)
        turns = actor_of(agent).conversation(0).turns
        assert dict(turns[-1].prompt.replies_shown) == Counter(given)
        given.append(turns[-1].reply.ids)
        agent.assign_reward(0.0)
    actor_of(agent).conversation(0).first_shown = 3
    conversation = actor_of(agent).conversation(0)
    conversation.observe("Observation 4", choices=["left", "right"])
    assert conversation.pending is not None
    assert dict(conversation.pending.replies_shown) == {given[3]: 1}
    alone = make_agent(ChoiceAgent, context="turn")
    for turn in range(2):
        alone.act(turn)
        assert actor_of(alone).conversation(0).turns[-1].prompt.replies_shown == ()
        alone.assign_reward(0.0)


def test_replies_that_fill_the_window_are_forgotten_with_their_turns():
    agent = make_agent(ChoiceAgent)
    conversation = actor_of(agent).new_conversation()
    conversation.max_length = 200
    for turn in range(30):
        segment = conversation.observe(f"Observation {turn}", choices=ChoiceAgent.choices)
        shown = sum(count for _, count in segment.prompts[-1].replies_shown)
        assert shown == len(conversation.turns) - conversation.first_shown
        with agent.policy.acting(True):
            agent.policy.calibrate([segment])
            (reply,) = agent.policy.sample([segment])
        conversation.answer(reply, "")
    assert conversation.first_shown > 0


def test_branch_points_have_their_own_repeat_counts():
    """Of a choice that parts from others late, and of which earlier replies said a part, or something else."""
    choices = ((1, 2, 3), (1, 2), (4,), (5,), (6, 7))
    replies = (((1, 2), 2), ((1, 9), 1), ((5,), 4))
    prompt = Prompt((8, 9), True, choices, replies_shown=replies)
    reply = Reply((1, 2, 3), (0.0,), 0.0, "choice", 0, 0)
    for decision in (Decision.from_turn(0, prompt, None), Decision.from_turn(0, prompt, reply)):
        counts = {
            (*branch.path, token): count
            for branch, of_branch in zip(decision.branches, decision.repeat_counts, strict=True)
            for token, count in zip(branch.targets, of_branch, strict=True)
        }
        assert counts == {(1,): 3, (4,): 0, (5,): 4, (6,): 0, (1, 2, 3): 0, (1, 2, END): 2}
