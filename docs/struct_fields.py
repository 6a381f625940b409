"""Shows the fields of a struct as its signature: griffe reads sources, and knows dataclasses only."""

from __future__ import annotations

from typing import Any

from griffe import Class, Extension, Function, Module, Parameter, ParameterKind, Parameters


class StructFields(Extension):
    """Gives every `msgspec.Struct` of a package an `__init__` with its fields, inherited ones first."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Go through a package once all of it is loaded, so that bases can be followed."""
        self._visit(pkg)

    def _visit(self, scope: Module | Class) -> None:
        for member in scope.members.values():
            if member.is_alias:
                continue
            if member.is_class and "__init__" not in member.members:
                self._add_init(member)
            if member.is_class or member.is_module:
                self._visit(member)

    def _add_init(self, struct: Class) -> None:
        family = [struct, *struct.mro()]
        if not any(str(base).endswith("Struct") for each in family for base in each.bases):
            return
        positional, keywords = {}, {}
        for each in reversed(family):
            named = str(each.keywords.get("kw_only")) == "True"
            kind = ParameterKind.keyword_only if named else ParameterKind.positional_or_keyword
            for name, field in each.attributes.items():
                if not field.is_alias and "instance-attribute" in field.labels and field.annotation:
                    parameter = Parameter(
                        name, annotation=field.annotation, kind=kind, default=field.value
                    )
                    (keywords if named else positional)[name] = parameter
        parameters = Parameters(Parameter("self"), *positional.values(), *keywords.values())
        struct.set_member("__init__", Function("__init__", parameters=parameters, parent=struct))
