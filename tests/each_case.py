"""`each_case`: like `pytest.mark.parametrize`, but all cases run in one test, for cases that take microseconds."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Test = Callable[..., Any]


def each_case(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Any]:
    """Run a test for each value; an error names its case. The cases share fixtures."""
    keys = names.replace(" ", "").split(",") if isinstance(names, str) else names
    cases = [dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values]

    def decorate(test: Test) -> Any:
        def run(*given: Any, **fixtures: Any) -> None:
            for case in cases:
                with named(case):
                    test(*given, **case, **fixtures)

        async def run_async(*given: Any, **fixtures: Any) -> None:
            for case in cases:
                with named(case):
                    await test(*given, **case, **fixtures)

        chosen: Any = run_async if inspect.iscoroutinefunction(test) else run
        functools.update_wrapper(chosen, test)
        signature = inspect.signature(test)
        fixtures = [each for name, each in signature.parameters.items() if name not in keys]
        chosen.__signature__ = signature.replace(parameters=fixtures)
        return chosen

    return decorate


@contextlib.contextmanager
def named(case: dict[str, Any]) -> Iterator[None]:
    """Add a case to an error."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case {case!r:.500}")
        raise
