"""Offline inference: `LLM` runs batches of prompts or conversations synchronously.

An engine in a thread with its own event loop, so that it works in scripts and in notebooks, whose thread has a loop
already.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import os
import random
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, Self, TypeVar, cast

import msgspec
import uvloop
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vsched.aio.arrivals import checked_argument
from vsched.api.chat_messages import split_messages, with_template_calls
from vsched.api.request_schema import Message
from vsched.checkpoints import with_local_checkpoints
from vsched.config import Config, load_config
from vsched.engine import Engine
from vsched.errors import ConfigError, RequestFailed, RequestRefused, VschedError
from vsched.media import ImageReference, Prompt
from vsched.plain_values import shared_decoder
from vsched.terminal.progress import loading_progress
from vsched.types import SamplingParams

AHEAD = 16
"""Requests in preparation while all slots run."""
T = TypeVar("T")


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The output for one prompt.

    Attributes:
        text: Generated text.
        token_ids: Generated tokens.
        finish_reason: `stop`, `length`, or `error`.
        prompt_tokens: Number of prompt tokens, including those of images.
        cached_tokens: Number of prompt tokens found in the prefix cache.
        error: Error message with `on_error="keep"`, otherwise empty.
    """

    text: str
    token_ids: list[int] = []
    finish_reason: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class LLM:
    """Offline inference with one checkpoint.

    Use it as `with LLM(path) as llm:`, or call `close`; it is closed at the latest when the process exits.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "",
        *,
        config: Config | None = None,
        settings: Sequence[str] = (),
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        """Load the checkpoint.

        Blocks: up to `deadlines.ready_s`.

        Args:
            model: Folder of the checkpoint, ORG/NAME[@REVISION] of the Hugging Face hub, or a GGUF file.
            config: A whole configuration, instead of `model` and `settings`.
            settings: Configuration keys, such as `generate.slots=8`; the environment applies, too.
            seed: Determines the seeds of prompts whose sampling parameters have none.
            progress: Show progress bars if standard error is a terminal.

        Raises:
            CheckpointError, ConfigError, DeviceOutOfMemory, GroupLostError: If the start fails.
        """
        if config is None:
            given = [settings] if isinstance(settings, str) else settings
            sets = [f"model.path={os.fspath(model)}", *given]
            config = load_config(None, sets=sets, environ=os.environ).config
        elif model or settings:
            raise ConfigError(
                "LLM: config is a whole configuration. Remedy: leave model and settings out, or config"
            )
        config = with_local_checkpoints(config)
        self._console = Console(stderr=True)
        self._progress = progress and (self._console.is_terminal or self._console.is_jupyter)
        self._numbers = itertools.count(1)
        self._seeds = random.Random(seed)  # noqa: S311 - draws of tokens, not secrets
        self._loop = _LoopThread()
        self._close = weakref.finalize(self, self._loop.close)
        try:
            self.engine = self._loop.call(self._start_engine(config))
        except BaseException:
            self.close()
            raise
        self._loop.at_end = self.engine.stop
        served = self.engine.config
        self._in_flight = min(
            served.generate.slots * served.generate.replicas + AHEAD,
            served.generate.max_waiting,
            served.media.preparing_max,
        )

    async def _start_engine(self, config: Config) -> Engine:
        quiet = Console(file=io.StringIO())
        with loading_progress(self._console if self._progress else quiet) as report:
            engine = Engine(config, on_progress=report)
            await engine.start()
            return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and release all resources; may be called twice."""
        self._close()

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[str | Sequence[int] | Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        on_error: Literal["raise", "keep"] = "raise",
        **options: Any,
    ) -> list[Completion]:
        """Complete prompts, without a chat template; the completions are in their order.

        Args:
            prompts: Texts, lists of token ids, or mappings `{"prompt": ..., "images": [...]}`; or a single text or
                mapping. Images are URLs or PIL images.
            sampling: Sampling parameters; by default the checkpoint's, up to the end of the context.
            on_error: Raise the first error, with a note that names its prompt, and abort the other requests; or keep
                it in its completion.
            options: Further arguments of `Engine.generate`, such as `adapter`.

        Raises:
            RequestRefused: If a prompt is refused.
            RequestFailed: If a request ended in an error.
        """
        one = isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable)
        listed: list[Any] = [prompts] if one else list(cast("Iterable[Any]", prompts))
        return self._run_prompts(
            [partial(_prompt, one) for one in listed], sampling, on_error, options
        )

    def chat(
        self,
        messages: Mapping[str, Any] | Iterable[Any],
        sampling: SamplingParams | None = None,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        on_error: Literal["raise", "keep"] = "raise",
        **options: Any,
    ) -> list[Completion]:
        """Answer conversations; the completions are in their order.

        Args:
            messages: A message or a conversation as in OpenAI's API, or a list of conversations. Content parts may
                also be `{"type": "image_pil", "image_pil": image}` with a PIL image.
            sampling: As for `generate`.
            template_arguments: Arguments of the chat template, such as `{"enable_thinking": False}`.
            on_error: As for `generate`.
            options: As for `generate`.

        Raises:
            RequestRefused: If a conversation is refused.
            RequestFailed: If a request ended in an error.
        """
        given: list[Any] = [messages] if isinstance(messages, Mapping) else list(messages)
        listed: list[Any] = [given] if given and isinstance(given[0], Mapping) else given
        arguments = {"add_generation_prompt": True, **(template_arguments or {})}
        render = self.engine.preprocessor.render
        prepares = [partial(_conversation, render, one, arguments) for one in listed]
        return self._run_prompts(prepares, sampling, on_error, options)

    def _run_prompts(
        self,
        prepares: Sequence[_Prepare],
        sampling: SamplingParams | None,
        on_error: str,
        options: Mapping[str, Any],
    ) -> list[Completion]:
        for name in options.keys() & {*SamplingParams.__struct_fields__}:
            raise TypeError(
                f"{name} is a sampling parameter. Remedy: pass SamplingParams({name}=...)"
            )
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, disable=not self._progress) as bar:
            task = bar.add_task("requests", total=len(prepares), rate="")

            def on_done(tokens: int) -> None:
                elapsed_s = bar.tasks[0].elapsed or 1
                bar.update(task, advance=1, rate=f"{tokens / elapsed_s:.0f} tokens/s")

            return self._loop.call(
                self._complete_all(prepares, sampling, on_error == "keep", options, on_done)
            )

    async def _complete_all(
        self,
        prepares: Sequence[_Prepare],
        sampling: SamplingParams | None,
        keeps_errors: bool,
        options: Mapping[str, Any],
        on_done: Callable[[int], None],
    ) -> list[Completion]:
        room = asyncio.Semaphore(self._in_flight)
        if sampling is None:
            sampling = self.engine.default_sampling()
        sampling = checked_argument("sampling", sampling, SamplingParams)
        tokens = 0

        async def one(index: int, prepare: _Prepare, sampling: SamplingParams) -> Completion:
            nonlocal tokens
            async with room:
                try:
                    found = await self._complete(prepare, sampling, options)
                except (RequestRefused, RequestFailed) as error:
                    if not keeps_errors:
                        error.add_note(f"This is entry {index} of the batch, counted from 0.")
                        raise
                    found = Completion(text="", finish_reason="error", error=error.message)
            tokens += len(found.token_ids)
            on_done(tokens)
            return found

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(one(index, prepare, self._with_seed(sampling)))
                    for index, prepare in enumerate(prepares)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _with_seed(self, sampling: SamplingParams) -> SamplingParams:
        """Draw a seed if there is none; by the order of prompts, because that of submissions varies."""
        if sampling.seed is not None:
            return sampling
        return msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(63))

    async def _complete(
        self,
        prepare: _Prepare,
        sampling: SamplingParams,
        options: Mapping[str, Any],
    ) -> Completion:
        prompt, images = await asyncio.to_thread(prepare)  # encodes images
        generation = await self.engine.generate(
            prompt=prompt,
            images=images,
            sampling=sampling,
            request_id=f"offline-{next(self._numbers)}",
            **options,
        )
        text: list[str] = []
        token_ids: list[int] = []
        async for delta in generation:
            text.append(delta.text)
            token_ids += delta.token_ids
        return Completion(
            text="".join(text),
            token_ids=token_ids,
            finish_reason=str(generation.reason or ""),
            prompt_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
        )


_Prepare = Callable[[], tuple[Prompt, Sequence[ImageReference]]]
"""Returns a prompt and its images; called in a thread, once the request may start."""


def _prompt(prompt: str | Sequence[int] | Mapping[str, Any]) -> tuple[Prompt, Any]:
    """Return one entry of `generate` as a prompt and its images."""
    if not isinstance(prompt, Mapping):
        return cast("Prompt", prompt), ()  # the engine refuses other types
    unknown = sorted(prompt.keys() - {"prompt", "images"})
    if unknown or "prompt" not in prompt:
        raise RequestRefused(
            f"a prompt has the keys {', '.join(map(str, prompt))}. Remedy: pass prompt, and images if there are any.",
            code="invalid_value",
        )
    return prompt["prompt"], _references(prompt.get("images", ()))


def _conversation(
    render: Callable[..., str], messages: Sequence[Mapping[str, Any]], arguments: dict[str, Any]
) -> tuple[Prompt, Sequence[ImageReference]]:
    """Render a conversation with the chat template, and list its images."""
    shared_decoder(list[Message])
    try:
        converted = msgspec.convert([_encoded(message) for message in messages], list[Message])
    except (msgspec.ValidationError, TypeError) as error:
        raise RequestRefused(f"messages: {error}", code="invalid_value") from None
    rendered, images = split_messages(converted)
    return render(with_template_calls(rendered), **arguments), images


def _encoded(message: object) -> object:
    """Replace PIL images in a message by data URLs; return anything but a mapping unchanged."""
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    parts = [
        {"type": "image_url", "image_url": _reference(part["image_pil"])}
        if isinstance(part, Mapping) and part.get("type") == "image_pil"
        else part
        for part in content
    ]
    return {**message, "content": parts}


def _references(images: Any) -> Any:
    """Encode the PIL images of a list as data URLs; return anything but an iterable unchanged."""
    is_list = isinstance(images, Iterable) and not isinstance(images, str)
    return list(map(_reference, images)) if is_list else images


_PNG_MODES = frozenset(["1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"])


def _reference(image: ImageReference | Image.Image) -> ImageReference:
    """Encode a PIL image as a data URL; return other references unchanged.

    Raises:
        RequestRefused: If it cannot be read, such as an opened file that is damaged, or be converted to RGB.
    """
    if not isinstance(image, Image.Image):
        return image
    buffer = io.BytesIO()
    try:
        image = image if image.mode in _PNG_MODES else image.convert("RGB")
        image.save(buffer, "PNG", compress_level=1)
    except Exception as error:
        message = f"a PIL image cannot be encoded ({error}). Remedy: pass a complete RGB image."
        raise RequestRefused(message, code="image_invalid") from error
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.at_end: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vsched", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; an interrupt cancels it.

        Raises:
            VschedError: If the loop is closed.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise VschedError("the engine is closed. Remedy: create another LLM")
        running = cast("Future[T]", asyncio.run_coroutine_threadsafe(coroutine, self._loop))
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def close(self) -> None:
        """Call `at_end`, end the thread, and close the loop."""
        try:
            if self.at_end is not None:
                self.call(self.at_end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
