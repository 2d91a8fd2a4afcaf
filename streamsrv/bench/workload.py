"""What the requests of a load are: each one made of the seed and its number alone."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from streamsrv.bench.errors import BenchError
from streamsrv.bench.lengths import Fixed, Lengths
from streamsrv.bench.prompt_sets import PromptSet
from streamsrv.bench.prompts import prompt_maker
from streamsrv.client import ChatMessages, Client, make_request
from streamsrv.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What each request asks for: greedy, and exactly `max_tokens` tokens."""

    num_prompt_tokens: int = 200
    """Length of the prompts, for whoever cuts them."""
    max_tokens: int = 64
    model: str = ""
    zstd: bool = True
    max_tokens_per_chunk: int | None = None
    min_chunk_interval_ms: int | None = None
    prompt_lookup: bool | None = None
    use_prefix_cache: bool | None = None

    def request(
        self, prompt: str | Seq[int] | ChatMessages, max_tokens: int | None = None
    ) -> pb.GenerateRequest:
        """Make the request for a prompt, for `max_tokens` of its own if given."""
        return make_request(
            prompt,
            model=self.model,
            temperature=0.0,
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            ignore_eos=True,
            zstd=self.zstd,
            max_tokens_per_chunk=self.max_tokens_per_chunk,
            min_chunk_interval_ms=self.min_chunk_interval_ms,
            prompt_lookup=self.prompt_lookup,
            use_prefix_cache=self.use_prefix_cache,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Where prompts come from, and how long they and their outputs are.

    Without `prompts` and `prompt_set`, prompts are cut from the shipped text, all of them different.
    """

    shape: RequestShape = RequestShape()
    prompt_lengths: Lengths | None = None
    """None: `shape.num_prompt_tokens` each."""
    output_lengths: Lengths | None = None
    """None: `shape.max_tokens` each."""
    prompts: tuple[str | ChatMessages, ...] | None = None
    """To be sent in turn, whole."""
    prompt_set: PromptSet | None = None
    timeout_s: float | None = None
    """A request that has not ended after this fails; None waits without end."""

    def check(self, model: pb.Model) -> None:
        """Refuse what the model would refuse of each request, before any is sent.

        Raises:
            BenchError: it is such a workload.
        """
        if self.prompt_set is not None and not model.has_chat_template:
            raise BenchError(
                f"the model {model.name!r} has no chat template, and the prompts of a set are chats; "
                "take prompts of a length, or texts of your own"
            )
        least = (self.output_lengths or Fixed(self.shape.max_tokens)).least
        text = f"outputs of {least} tokens"
        if self.prompts is None and self.prompt_set is None:
            prompt = (self.prompt_lengths or Fixed(self.shape.num_prompt_tokens)).least
            least, text = least + prompt, f"prompts of {prompt} and {text}"
        if least > model.context_length:
            raise BenchError(
                f"{text} do not fit into the {model.context_length} tokens of the model {model.name!r}; "
                "take shorter ones"
            )

    async def requests(self, client: Client, seed: int) -> Callable[[int], pb.GenerateRequest]:
        """Give the maker of requests by their number; a server is asked for the ids of the shipped text.

        Raises:
            CallFailedError: the server could not be asked.
            BenchError: its tokenizer makes too few different tokens of the text.
        """
        make_prompt = await self._prompts(client, seed)
        lengths = self.output_lengths or Fixed(self.shape.max_tokens)

        def make(index: int) -> pb.GenerateRequest:
            return self.shape.request(make_prompt(index), lengths.draw(_generator(seed, "output", index)))

        return make

    async def _prompts(
        self, client: Client, seed: int
    ) -> (
        Callable[[int], str] | Callable[[int], ChatMessages] | Callable[[int], str | ChatMessages | Seq[int]]
    ):
        prompts, prompt_set = self.prompts, self.prompt_set
        if prompts is not None:
            return lambda index: prompts[index % len(prompts)]
        if prompt_set is not None:
            return lambda index: prompt_set.make(seed, index)
        maker = await prompt_maker(client, self.shape.num_prompt_tokens, seed, self.shape.model)
        lengths = self.prompt_lengths or Fixed(self.shape.num_prompt_tokens)
        return lambda index: maker.make(index, lengths.draw(_generator(seed, "prompt", index)))


def _generator(seed: int, what: str, index: int) -> random.Random:
    return random.Random(f"{seed} {what} {index}")  # noqa: S311 (no secret)
