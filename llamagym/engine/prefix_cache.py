"""A transformer that remembers: what it has read, or written itself, it does not compute again.

A conversation is known by its tokens and read on from where it was known. A reply that was written is not read when it
has become history: its entries are those that writing left. Where an activated LoRA acted on it, that holds below the
adapted layers; these read it once more, since it acts on no history.

Shapes: B rows, T tokens, S tokens of history after the prefix, D decision nodes, H width, L layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache

from ..models.lora import acting_on_every_token, is_activated
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .hardware import memory_bytes
from .kv_cache import Opening, Places, Unread, Written, cache_of, entries_of
from .lru import Recent, Space
from .masks import causal
from .token_tree import Batch, Ids, TokenTree
from .transformer import Transformer, probe

logger = logging.getLogger(__name__)

# Kept at most, of what was read: so many bytes or this share of the device's memory. 20 tokens take 900 kB in a 135M
# model, and 250 kB more where 8 layers are adapted. Conversations under way, or observations that come again and again,
# are read anew every time where they do not fit.
_KEPT_BYTES, _KEPT_SHARE = 512 * 2**20, 1 / 16
_WRITTEN_BYTES = 512 * 2**20  # Of what was written: a token takes 50 kB in a 135M model.
_STATES_BYTES = 512 * 2**20  # Of decisions' states where the adapted layers begin: 2 kB a token.
_OPENINGS_BYTES = 128 * 2**20  # Of what opens replies, in the frozen layers: 36 kB a token.
_SPACE_BYTES = 128 * 2**20  # For replies in the making: 64 rows of 40 tokens take 60 MB in a 135M model.
# Attention in two parts, to what is shared and to a row's own, takes longer than in one where there is less to share:
# fewer pairs of tokens than these.
_SHARED_SCORES = 1024
# Tokens of history in one pass.
_HISTORY_TOKENS = 2048


class Memory(Transformer):
    """A causal language model that remembers what it has read and written.

    Attributes:
        history_is_frozen: Whether histories do not depend on what is trained.
        tokens_forwarded: Tokens, with what padding there was, that were read or decided so far.
        written: By prefix, history, what opens a reply and its beginning: what was written since the weights changed.
        space: For the rows of replies in the making.
    """

    def __init__(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Remember nothing yet."""
        super().__init__(model)
        self.history_is_frozen = is_activated(model.pretrained_model)
        self.tokens_forwarded = 0
        kept = max(_KEPT_BYTES, int(_KEPT_SHARE * memory_bytes(self.device)))
        # Entries of all layers, for what is read on or written; of the adapted layers, for decisions; and of decisions,
        # states where these layers begin.
        nbytes = attrgetter("nbytes")
        self._histories: Recent[tuple[Ids, Ids], Tensor] = Recent(nbytes, kept)
        self._tops: Recent[tuple[Ids, Ids], Tensor] = Recent(nbytes, kept)
        # By prefix, history, and the decision's ids and parents.
        self._states: Recent[tuple[Ids, Ids, Ids, Ids], Tensor] = Recent(nbytes, _STATES_BYTES)
        # By prefix, history and what opens the reply.
        self._openings: Recent[tuple[Ids, Ids, Ids], Opening] = Recent(nbytes, _OPENINGS_BYTES)
        self.written: Recent[tuple[Ids, Ids, Ids, Ids], Written] = Recent(nbytes, _WRITTEN_BYTES)
        self.space = Space(_SPACE_BYTES)
        self._nothing = self._no_entries()
        if not self._sees_as_alone(is_shared=False):
            logger.info("layers of %s do not run as one function each", type(self._lm).__name__)
            self._acceleration.unfuse()
        is_sdpa = self._body.config._attn_implementation == "sdpa"
        # On a processor, where it was measured; in learning and acting.
        self._can_share = is_sdpa and self.device.type == "cpu" and self._sees_as_alone(is_shared=True)
        self._can_share = self._can_share and self._sees_as_alone(is_shared=True, is_learning=True)
        # Tokens of several rows side by side, in learning.
        self._can_pack = is_sdpa and self._sees_as_alone(self._can_share, is_learning=True, is_packed=True)
        if self.history_is_frozen:
            self._split()
        # Passes to come multiply by other copies than these first ones, which were not fused.
        self.forget_copies()

    def forget(self) -> None:
        """Drop what depends on weights that have changed."""
        self.written.clear()
        if not self.history_is_frozen:
            self.forget_histories()

    def forget_histories(self) -> None:
        """Drop what was read."""
        self._histories.clear()
        self._tops.clear()
        self._states.clear()
        self._openings.clear()

    @torch.no_grad()
    def open(self, trees: Sequence[TokenTree]) -> tuple[list[Tensor], list[Opening]]:
        """Entries (2L, heads, S, head size) of each tree's history, and what opens the reply, of the frozen layers."""
        keys = {tree: (*tree.context, tree.decisions[0].ids) for tree in trees}
        known = {tree: opening for tree, key in keys.items() if (opening := self._openings.get(key)) is not None}
        entries = dict(zip(known, self.read(list(known)), strict=True))
        for histories, below, cache in self._read_below([tree for tree in keys if tree not in known]):
            width = below.shape[1]
            own = [self._nothing[:0]] * len(below) if cache is None else entries_of(cache, slice(-width, None))
            for tree, of_history, of_tree, states in zip(histories, histories.values(), own, below, strict=True):
                count = tree.node_count
                entries[tree], known[tree] = of_history, Opening(of_tree[:, :, :count].clone(), states[:count].clone())
                self._openings.put(keys[tree], known[tree])
        return [entries[tree] for tree in trees], [known[tree] for tree in trees]

    def write(
        self, inputs: Tensor, positions: Tensor, visible: Tensor, key_positions: Tensor, cache: Cache
    ) -> tuple[Tensor, Tensor]:
        """Hidden states (B, T, H) of a reply's tokens, whose entries are added to the cache, and where the top begins.

        Args:
            inputs: Token ids, int64 (B, T), or their states where the top begins, float (B, T, H).
            positions: Their positions, int64 (B, T).
            visible: Which entries, the new ones included, each token sees, bool (B, T, S).
            key_positions: Positions of the entries, int64 (B, S).
            cache: Holds the S - T entries before, and below the top those of tokens given as states.
        """
        self.tokens_forwarded += positions.numel()
        if inputs.is_floating_point():
            below = inputs
        elif self._trunk is None:
            below = self._embedded(inputs)
        else:
            below = self._run(self._trunk, inputs, positions, visible, key_positions, cache)
        with acting_on_every_token(self._top):
            return self._run(self._top, below, positions, visible, key_positions, cache), below

    def spoken(self, prefix: Ids, history: Ids, opening: Ids, said: Ids) -> tuple[Written, ...]:
        """What is known of a reply's tokens, those that open it first; empty if it is not all known."""
        parts = []
        for length in range(len(said) + 1):
            if (part := self.written.get((prefix, history, opening, said[:length]))) is None:
                return ()
            parts.append(part)
        return tuple(parts)

    def keep_for_learning(self, tree: TokenTree, said: Ids) -> None:
        """Keep what the frozen layers made of a reply, which learning begins with; the last token is not decided on."""
        opening = tree.decisions[0].ids
        below = [part.below for part in self.spoken(*tree.context, opening, said[:-1])]
        if below and self.history_is_frozen:
            ids = opening + said[:-1]
            self._states.put((*tree.context, ids, tuple(range(-1, len(ids) - 1))), torch.cat(below))

    def read_prefix(self, ids: Ids) -> Tensor:
        """Entries (2L, heads, P, head size) of a shared prefix."""
        return self.read([TokenTree((), ids, ())])[0] if ids else self._nothing

    @torch.no_grad()
    def read(self, trees: Sequence[TokenTree]) -> list[Tensor]:
        """Entries (2L, heads, S, head size) of each tree's history, of which only what is new is read."""
        found, chunks = self._look_up(trees)
        for chunk in chunks:
            found |= self._read_on(chunk)[0]
        return [found[tree] for tree in trees]

    def shares(self, prefix: Tensor, queries: int) -> bool:
        """Whether `queries` tokens in one pass had better look at a prefix where it is than at copies of it."""
        return self._can_share and queries * prefix.shape[2] >= _SHARED_SCORES

    @property
    def _bottom(self) -> int:
        """How many of a history's entries, keys and values of each layer, lie below the top."""
        return 2 * self._first_top_layer

    def _look_up(self, trees: Sequence[TokenTree]) -> tuple[dict[TokenTree, Tensor], list[list[Unread]]]:
        """Entries of the histories that are known, and what is left to read of others, alike in length in a chunk."""
        found: dict[TokenTree, Tensor] = {}
        fresh: list[Unread] = []
        for tree in dict.fromkeys(trees):
            if (known := self._histories.get(tree.context)) is not None:
                found[tree] = known
            else:
                fresh.append(self._known_of(tree))
        chunks: list[list[Unread]] = []
        for unread in sorted(fresh, key=lambda unread: len(unread.ids)):
            if not chunks or (len(chunks[-1]) + 1) * len(unread.ids) > _HISTORY_TOKENS:
                chunks.append([])
            chunks[-1].append(unread)
        return found, chunks

    def _known_of(self, tree: TokenTree) -> Unread:
        """A history up to the latest decision before which it was read, and the reply if it was written."""
        for start, said, end in reversed(tree.marks):
            known = self._histories.get((tree.prefix, tree.history[:start]))
            if known is not None:
                # Without a trunk, nothing that was written under an activated LoRA is as it is read.
                is_valid = self._trunk is not None or not self.history_is_frozen
                reply = tree.history[start:said], tree.history[said : end - 1]
                spoken = self.spoken(tree.prefix, tree.history[:start], *reply) if is_valid else ()
                return Unread(tree, known, spoken)
        return Unread(tree, self._nothing, ())

    def _read_below(self, trees: Sequence[TokenTree]) -> Iterator[tuple[dict[TokenTree, Tensor], Tensor, Cache | None]]:
        """In groups, entries of the trees' histories and what the frozen layers make of their decisions.

        Yields:
            The entries (2L, heads, S, head size) of each tree; the states of its decisions where the top begins, (B, D,
            H); and a cache whose last D columns are their entries below the top, None where nothing lies below.
        """
        known, chunks = self._look_up(trees)
        if self._trunk is None:
            for chunk in chunks:
                known |= self._read_on(chunk)[0]
            if known:
                yield known, self._embedded(Batch.from_trees(list(known)).ids), None
            return
        if known:
            prefix = self.read_prefix(trees[0].prefix)[: self._bottom]
            rows, nothing = [row[: self._bottom] for row in known.values()], [torch.zeros(0, dtype=torch.long)]
            yield (known, *self._extend(self._trunk, prefix, rows, nothing * len(rows), Batch.from_trees(list(known))))
        for chunk in chunks:
            entries, below, cache = self._read_on(chunk, Batch.from_trees([unread.tree for unread in chunk]))
            yield entries, below, cache

    def _embedded(self, ids: Tensor) -> Tensor:
        """Embeddings (B, T, H) of ids (B, T): the states where the top begins if it is the whole body."""
        result: Tensor = self._body.get_input_embeddings()(ids.to(self.device))
        return result

    def _read_on(
        self, fresh: list[Unread], decisions: Batch | None = None
    ) -> tuple[dict[TokenTree, Tensor], Tensor, Cache]:
        """Read histories from where earlier turns stopped; returns the entries of all.

        Args:
            fresh: What is left to read.
            decisions: Those of the same trees; run through the trunk beside their histories, which saves a pass. The
                other results are their states where the top begins, (B, D, H), and a cache that ends with them.
        """
        prefix, bottom = self.read_prefix(fresh[0].tree.prefix), self._bottom
        rows, ids = [], [torch.tensor(unread.ids, dtype=torch.long) for unread in fresh]
        for unread in fresh:
            row = prefix.new_empty(*prefix.shape[:2], len(unread.tree.history), prefix.shape[3])
            row[:, :, : unread.mark] = unread.known
            if unread.spoken:
                written = torch.cat([part.entries for part in unread.spoken], dim=2)
                row[:, :, unread.mark : unread.mark + written.shape[2]] = written
            rows.append(row)
        size = max(map(len, ids))
        self.tokens_forwarded += len(fresh) * size
        if self._trunk is None:
            below, cache = self._extend(self._body, prefix, rows, ids)
        else:
            below, cache = self._extend(self._trunk, prefix[:bottom], [row[:bottom] for row in rows], ids, decisions)
            inputs = []
            for unread, states in zip(fresh, below, strict=True):
                spoken = [part.below for part in unread.spoken]
                inputs.append(torch.cat([*spoken, states[: len(unread.ids)]]))
            self._extend(self._top, prefix[bottom:], [row[bottom:] for row in rows], inputs)
        found = {}
        for row, unread in zip(rows, fresh, strict=True):
            tree = unread.tree
            # Its conversation has gone on; what follows it has a copy.
            self._histories.pop((tree.prefix, tree.history[: unread.mark]))
            found[tree] = row
            self._histories.put(tree.context, row)
            if self.history_is_frozen:
                self._top_of(tree, row)
        return found, below[:, size:], cache

    def _top_of(self, tree: TokenTree, entries: Tensor) -> Tensor:
        """Of a history's entries those of the adapted layers, which are kept for longer since they are fewer."""
        if (top := self._tops.get(tree.context)) is None:
            top = entries[self._bottom :].clone()
            self._tops.put(tree.context, top)
        return top

    def _extend(
        self,
        part: nn.Module,
        prefix: Tensor,
        rows: Sequence[Tensor],
        inputs: Sequence[Tensor],
        decisions: Batch | None = None,
    ) -> tuple[Tensor, Cache]:
        """Read tokens that follow known ones.

        Returns their last hidden states, and those of decisions, (B, T + D, H), and a cache that ends with them.

        Args:
            part: Body, trunk or top.
            prefix: Entries of its layers of the shared prefix.
            rows: Entries of each history, (2L, heads, S, head size); those of the inputs come last and are filled in.
            inputs: Ids (T,) or hidden states (T, H) of each row.
            decisions: That branch off these histories, as ids; one row each.
        """
        first_layer = self._first_top_layer if part is self._top else 0
        fed, lengths = pad_sequence(list(inputs), batch_first=True), torch.tensor([len(own) for own in inputs])[:, None]
        marks = torch.tensor([row.shape[2] for row in rows])[:, None] - lengths
        (count, size), shared, seen = fed.shape[:2], prefix.shape[2], int(marks.max())
        width = 0 if decisions is None else decisions.ids.shape[1]
        known = [row[:, :, :mark] for row, mark in zip(rows, marks[:, 0].tolist(), strict=True)]
        cache = cache_of(prefix, known, seen, size + width, self.shares(prefix, count * (size + width)), first_layer)
        if not size + width:
            return fed, cache
        positions = shared + marks + torch.arange(size)
        keys = torch.cat([torch.arange(shared + seen).expand(count, -1), positions], dim=1)
        before = torch.arange(shared + seen) < shared + marks
        visible = torch.cat([before[:, None].expand(-1, size, -1), causal(0, size).expand(count, -1, -1)], dim=2)
        if decisions is not None:
            starts, own = decisions.visible[:, :, :-width].sum(2), decisions.visible[:, :, -width:]
            filled = torch.cat([before, torch.arange(size) < lengths], dim=1)
            context = filled[:, None] & (keys[:, None] < starts[:, :, None])
            of_history = torch.cat([visible, torch.zeros(count, size, width, dtype=torch.bool)], dim=2)
            visible = torch.cat([of_history, torch.cat([context, own], dim=2)], dim=1)
            fed, positions = torch.cat([fed, decisions.ids], dim=1), torch.cat([positions, decisions.positions], dim=1)
            keys = torch.cat([keys, decisions.positions], dim=1)
        hidden = self._run(part, fed, positions, visible, keys, cache)
        new = entries_of(cache, slice(-size - width, -width or None), first_layer)
        for row, of_row, own in zip(rows, new, inputs, strict=True):
            row[:, :, row.shape[2] - len(own) :] = of_row[:, :, : len(own)]
        return hidden, cache

    def _no_entries(self) -> Tensor:
        """Entries of no tokens, (2L, heads, 0, head size): what every history begins with."""
        cache, nobody = DynamicCache(), torch.zeros(1, 1, dtype=torch.long)
        with torch.no_grad():
            self._run(self._body, nobody, nobody, causal(0, 1)[None], nobody, cache)
        return entries_of(cache, slice(0, 0))[0]

    def _sees_as_alone(self, is_shared: bool, is_learning: bool = False, is_packed: bool = False) -> bool:
        """Whether tokens see what was kept, shared or their own, as they would see it in a sequence of their own."""
        ids, positions, visible = probe()
        alone, errors = DynamicCache(), (TypeError, ValueError, AttributeError, RuntimeError)
        with torch.set_grad_enabled(is_learning), acting_on_every_token(self._body), suppress(*errors):
            self._run(self._body, ids, positions, visible, positions, alone)
            cache = cache_of(entries_of(alone, slice(0, 2))[0].detach(), [self._nothing] * 2, 0, 3, is_shared)
            # Packed, the second row has one token less.
            cache.places = Places(torch.arange(5), 2, 3) if is_packed else None
            ids, positions, visible = (part.expand(2, *part.shape[1:]) for part in (ids, positions, visible))
            self._run(self._body, ids[:, 2:], positions[:, 2:], visible[:, 2:], positions, cache)
            # What the first layer saw is what the second one's keys and values are made of. Over many layers bfloat16
            # drifts as far as an error would.
            expected, received = (entries_of(of, slice(-3, -1), 1)[:, :2] for of in (alone, cache))
            return torch.allclose(received, expected, atol=0.05 * expected.std().item(), rtol=0)
        return False
