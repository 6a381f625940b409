"""OpenVINO GenAI behind the part of OpenAI's API used by the load; run by its path in the peer's environment.

    python openvino_server.py MODEL --port PORT --threads N --slots N --cache-gib N

There is no maintained server with image support on PyPI. The pipeline runs in a separate process,
because its binding holds the GIL in `step` and `add_request`; in front of it one loop reads
requests, decodes pictures and writes tokens as text. One request with pictures, whose vision tower
runs in `add_request`, is added between two steps.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import multiprocessing
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
IMAGE_TAG = "<ov_genai_image_{}>"
END = b"data: [DONE]\n\n"
STEP_TOKENS = 256
"""As by default."""


# --- the pipeline process ---


def pipeline_process(options: argparse.Namespace, requests: Connection) -> None:
    """Serve requests from a pipe; lists of new tokens are sent back after each step."""
    import openvino_genai as genai

    sizes = genai.SchedulerConfig()
    sizes.cache_size = options.cache_gib
    sizes.max_num_seqs = options.slots
    sizes.max_num_batched_tokens = STEP_TOKENS
    sizes.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": options.threads, "KV_CACHE_PRECISION": "f16"}
    pipeline = genai.ContinuousBatchingPipeline(options.model, sizes, "CPU", properties)
    tokenizer = pipeline.get_tokenizer()
    requests.send("ready")
    waiting: list[dict[str, Any]] = []
    running: dict[int, Any] = {}
    while True:
        while requests.poll(None if not waiting and not running else 0):
            waiting.append(requests.recv())
        while waiting:
            request = waiting.pop(0)
            name = request["id"]
            try:
                running[name], prompt_tokens = add(genai, pipeline, tokenizer, request)
                requests.send((name, "prompt", prompt_tokens))
            except Exception as error:  # noqa: BLE001 - the answer to this one request
                requests.send((name, "error", str(error)))
            if request["pictures"]:
                break
        if pipeline.has_non_finished_requests():
            pipeline.step()
        for name, handle in list(running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    requests.send((name, "tokens", list(output.generated_ids)))
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                requests.send((name, "end", None))
                del running[name]


def add(genai: Any, pipeline: Any, tokenizer: Any, request: dict[str, Any]) -> tuple[Any, int]:
    """Add a request; return its generation handle, and the number of prompt tokens without pictures."""
    from openvino import Tensor

    config = genai.GenerationConfig()
    config.max_new_tokens = request["tokens"]
    config.ignore_eos = request["ignore_eos"]
    if request["ignore_eos"]:
        config.min_new_tokens = request["tokens"]
    config.do_sample = False
    config.apply_chat_template = False
    prompt = tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False).input_ids
    count = int(ids.shape[1])
    if not request["sees"]:
        return pipeline.add_request(request["id"], ids, config), count
    pictures = [Tensor(picture) for picture in request["pictures"]]
    return pipeline.add_request(request["id"], prompt, pictures, config), count


# --- the front process ---


class Front:
    """HTTP requests to the pipeline, and streams back."""

    def __init__(self, options: argparse.Namespace) -> None:
        from tokenizers import Tokenizer

        self.model = Path(options.model)
        self.sees = (self.model / "openvino_vision_embeddings_model.xml").exists()
        self.tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        self.ready = False
        self._names = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[tuple[str, Any]]] = {}
        # concurrent writes from several threads would corrupt the pipe
        self._sending = asyncio.Lock()
        self._pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=pipeline_process, args=(options, other), daemon=True)
        self._process.start()
        other.close()

    def listen(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        """Forward the pipeline's messages until it ends; runs in a thread."""
        try:
            self._pipe.recv()
            self.ready = True
            while True:
                name, kind, content = self._pipe.recv()
                if stream := self._streams.get(name):  # otherwise the client is gone
                    loop.call_soon_threadsafe(stream.put_nowait, (kind, content))
        except (EOFError, OSError):
            loop.call_soon_threadsafe(ended.set)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one request on its connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *fields = head.split("\r\n")
            sizes = [
                text.split(":")[1] for text in fields if text.lower().startswith("content-length:")
            ]
            body = await reader.readexactly(int(sizes[0])) if sizes else b""
            if line.startswith("POST /v1/chat/completions"):
                await self._chat(json.loads(body), writer)
            else:
                status = "200 OK" if self.ready else "503 Loading"
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client is gone
        finally:
            writer.close()

    async def _chat(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        name = next(self._names)
        messages, pictures = self._read(body["messages"])
        request = {
            "id": name,
            "messages": messages,
            "pictures": pictures,
            "sees": self.sees,
            "tokens": body["max_tokens"],
            "ignore_eos": body.get("ignore_eos", False),
        }
        stream = self._streams[name] = asyncio.Queue()
        try:
            async with self._sending:
                await asyncio.to_thread(self._pipe.send, request)
            head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head.encode())
            await self._stream(stream, writer)
        finally:
            del self._streams[name]

    async def _stream(
        self, stream: asyncio.Queue[tuple[str, Any]], writer: asyncio.StreamWriter
    ) -> None:
        prompt_tokens, pending, total = 0, list[int](), 0
        while True:
            kind, content = await stream.get()
            match kind:
                case "prompt":
                    prompt_tokens = content
                case "error":
                    _event(writer, {"error": {"message": content}})
                    break
                case "end":
                    break
                case _:
                    pending += content
                    total += len(content)
                    text = self.tokenizer.decode(pending, skip_special_tokens=False)
                    if not text.endswith("\ufffd") or len(pending) > 4:
                        _event(writer, {"choices": [{"index": 0, "delta": {"content": text}}]})
                        pending = []
            await writer.drain()
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": total}
        _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, END)
        writer.write(b"0\r\n\r\n")

    def _read(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, str]], list[Any]]:
        """Return text-only messages, with a tag for each picture, and the pictures."""
        import numpy as np
        from PIL import Image

        pictures: list[Any] = []
        result = []
        for message in messages:
            parts = message["content"]
            text = parts if isinstance(parts, str) else ""
            for part in () if isinstance(parts, str) else parts:
                if part["type"] == "text":
                    text += part["text"]
                else:
                    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                    picture = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
                    text += IMAGE_TAG.format(len(pictures))
                    pictures.append(picture[None])
            result.append({"role": message["role"], "content": text})
        return result, pictures


def _event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve(options: argparse.Namespace) -> None:
    """Listen until the pipeline ends."""
    front = Front(options)
    ended = asyncio.Event()
    arguments = (asyncio.get_running_loop(), ended)
    threading.Thread(target=front.listen, args=arguments, daemon=True).start()
    async with await asyncio.start_server(front.handle, HOST, options.port, limit=1 << 24):
        await ended.wait()
    raise SystemExit("the pipeline ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    for name in ("port", "threads", "slots", "cache-gib"):
        parser.add_argument(f"--{name}", type=int, required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
