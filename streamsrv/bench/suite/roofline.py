"""A step of decoding against what reading its weights and its cache takes at least."""

import asyncio
import secrets
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from engines.api import ExecutionContext
from engines.demo_model import model_path
from engines.form import Dialect, GraphForm
from engines.manifest import Manifest
from engines.memory import usable_processors
from engines.options import WeightFormat
from engines.preparation import WEIGHTS_FILE
from engines.prepared import PreparedModels
from engines.spec import ModelSpec
from streamsrv.bench.prompts import PromptMaker, shipped_text
from streamsrv.bench.suite.direct_loop import Part, make_batch
from streamsrv.bench.suite.markdown import section
from streamsrv.bench.suite.read_speed import ReadSpeed
from streamsrv.config import Settings, load_settings
from streamsrv.opening import open_model

_FORM = GraphForm(Dialect.PAGED, WeightFormat.INT8)
_FLAGS = {"engine": "openvino", "weights": WeightFormat.INT8.value}
_NUM_PASSES = 64
"""That read memory, in each round."""
_MB, _GB = 1e6, 1e9


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is stepped and read."""

    num_prompt_tokens: int = 200
    num_steps: int = 64
    buffer_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What a step of decoding reads at least."""

    weights: int
    """Each once: matrices, scales, norms, biases; an embedding table where it is the output projection."""
    rows: int
    """For each token: its rows of the tables that are looked up."""
    cached_token: float
    """For each token of a context: its keys and values over all layers."""

    @classmethod
    def of(cls, manifest: Manifest, cached_token: float) -> "StepBytes":
        """Take the file of the weights, but for tables of which a step reads rows alone.

        The file has at most 63 bytes of padding a tensor.
        """
        assert manifest.form == _FORM, "a row of another form has another size"
        spec = manifest.model.spec
        has_own_rope = spec.window is not None and spec.window.rope_theta is not None
        rope_row = spec.head_dim * 4 * (2 if has_own_rope else 1)  # cosines and sines of half a head
        embed_row = spec.hidden_size + 4  # int8, and their scale
        looked_up = spec.context_length * rope_row
        looked_up += 0 if spec.tied_embeddings else spec.vocab_size * embed_row
        return cls(manifest.files[WEIGHTS_FILE].size_bytes - looked_up, rope_row + embed_row, cached_token)


@dataclass(slots=True)
class Measured:
    """What was seen of a model."""

    spec: ModelSpec
    bytes: StepBytes
    num_threads: int
    read_speed: float = 0.0
    """Bytes/s, at the best of all rounds."""
    prompts_s: list[float] = field(default_factory=list)
    steps_s: dict[int, list[float]] = field(default_factory=dict)
    """By number of sequences: of each round the median step."""


def num_operations(spec: ModelSpec, num_tokens: int, num_logit_rows: int) -> int:
    """Count multiplications and additions: two for each weight, norms' few included; attention left out."""
    table = spec.vocab_size * spec.hidden_size
    layers = spec.num_parameters - table * (1 if spec.tied_embeddings else 2)
    return 2 * (num_tokens * layers + num_logit_rows * table)


async def roofline_section(
    model: str, batches: Seq[int], num_rounds: int, say: Callable[[str], None], sizes: Sizes | None = None
) -> str:
    """Step batches in turn, and read between them, so that a change in the machine's pace meets all."""
    sizes = sizes or Sizes()
    measured = await asyncio.to_thread(_measure, model, batches, num_rounds, say, sizes)
    length, steps = sizes.num_prompt_tokens, sizes.num_steps
    prompt_rate = num_operations(measured.spec, length, 1) / statistics.median(measured.prompts_s)
    return section(
        "Steps against the roofline",
        f"N sequences stepped directly, OpenVINO with int8 weights, contexts of {length} to {length + steps} "
        f"tokens: the engine's time of a step, the median of {num_rounds} interleaved rounds' medians of "
        f"{steps} steps. Weights: as they are held, each once, scales and norms included, and each token's "
        f"row of the embeddings. Cache: keys and values of all contexts, {measured.bytes.cached_token:,.0f} "
        "bytes a token. Activations and what is written are left out. At the read speed: both at "
        f"{measured.read_speed / _GB:.1f} GB/s, the best of {num_rounds * _NUM_PASSES} passes between the "
        f"rounds, each over the next fourth of {sizes.buffer_bytes >> 20} MiB, by {measured.num_threads} "
        "threads, the engine's number; they take dot products in NumPy, which write nothing. The share is "
        "that time's of the step's, with the least and the greatest of the rounds. GOP/s: two operations for "
        "each weight of a product and each token asked for, attention left out. For comparison, a prompt in "
        f"one step reaches {prompt_rate / _GB:.0f}.",
        (
            *("streams", "step, ms", "weights, MB", "cache, MB", "at the read speed, ms"),
            *("share of the roofline, %", "GOP/s"),
        ),
        [roofline_row(measured, batch, sizes) for batch in batches],
    )


def roofline_row(measured: Measured, batch: int, sizes: Sizes) -> list[str]:
    """Lay out what a step of as many sequences took, and what it would take at the read speed."""
    mean_past = sizes.num_prompt_tokens + (sizes.num_steps - 1) / 2
    weights = measured.bytes.weights + batch * measured.bytes.rows
    cache = batch * mean_past * measured.bytes.cached_token
    least_s = (weights + cache) / measured.read_speed
    step_s = statistics.median(measured.steps_s[batch])
    shares = [least_s / round_s * 100 for round_s in measured.steps_s[batch]]
    return [
        str(batch),
        f"{step_s * 1000:.1f}",
        f"{weights / _MB:.1f}",
        f"{cache / _MB:.1f}",
        f"{least_s * 1000:.1f}",
        f"**{statistics.median(shares):.0f}** ({min(shares):.0f}-{max(shares):.0f})",
        f"{num_operations(measured.spec, batch, batch) / step_s / _GB:.0f}",
    ]


def _measure(
    model: str, batches: Seq[int], num_rounds: int, say: Callable[[str], None], sizes: Sizes
) -> Measured:
    settings = load_settings({"model": model, **_FLAGS})
    manifest = _manifest(settings)
    with closing(open_model(settings)) as engine, closing(engine.create_context()) as context:
        tokenizer = Tokenizer.from_str(engine.model.vocabulary.tokenizer_json)
        ids = tokenizer.encode(shipped_text(), add_special_tokens=False).ids
        maker = PromptMaker(ids, sizes.num_prompt_tokens, secrets.randbits(32))
        step_bytes = StepBytes.of(manifest, context.cache.bytes_per_block / context.cache.block_size)
        measured = Measured(engine.model.spec, step_bytes, settings.threads or usable_processors())
        blocks_each = -(-(sizes.num_prompt_tokens + sizes.num_steps) // context.cache.block_size)
        say(f"computing {max(batches)} prompts")
        first_ids = []
        for i in range(max(batches)):
            batch = make_batch([Part(i, 0, maker.make(i), True)], blocks_each)
            began_s = time.perf_counter()
            logits = context.step(batch).logits
            measured.prompts_s.append(time.perf_counter() - began_s)
            first_ids.append(int(logits[0].argmax()))
        reader = ReadSpeed(sizes.buffer_bytes, measured.num_threads)
        for number in range(-1, num_rounds):  # the first round warms up and is not counted
            say(f"steps, and the speed of reading, round {number + 1} of {num_rounds}")
            speed = reader.best_of(_NUM_PASSES)
            for size in batches if number % 2 else reversed(batches):
                step_s = _median_step(context, first_ids[:size], sizes, blocks_each)
                if number >= 0:
                    measured.read_speed = max(measured.read_speed, speed)
                    measured.steps_s.setdefault(size, []).append(step_s)
    return measured


def _manifest(settings: Settings) -> Manifest:
    options = settings.engine_options
    store = PreparedModels(options.cache_folder, options.cache_folder_gib)
    with closing(store.open(model_path(settings.model), _FORM)) as prepared:
        return Manifest.read(prepared.folder)


def _median_step(context: ExecutionContext, token_ids: Seq[int], sizes: Sizes, blocks_each: int) -> float:
    """Continue sequences behind their prompts; what an earlier round put there is overwritten."""
    times = []
    for past in range(sizes.num_prompt_tokens, sizes.num_prompt_tokens + sizes.num_steps):
        batch = make_batch([Part(i, past, [token], True) for i, token in enumerate(token_ids)], blocks_each)
        began_s = time.perf_counter()
        logits = context.step(batch).logits
        times.append(time.perf_counter() - began_s)
        token_ids = [int(token) for token in logits.argmax(axis=1)]
    return statistics.median(times)
