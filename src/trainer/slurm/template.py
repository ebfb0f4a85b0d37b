"""The sbatch templates: where they lie, and how a faulty one is told. See docs/slurm.md."""

import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, FileSystemLoader, StrictUndefined, TemplateNotFound, TemplateSyntaxError
from jinja2.sandbox import SandboxedEnvironment

from configs.errors import ConfigError

SHIPPED_TEMPLATES = Path(__file__).parent / "templates"
"""Part of the package; in a checkout a link to the folder at the root."""

_KEY = "slurm.template_path"


def render_template(path: Path | None, name: str, variables: Mapping[str, Any]) -> str:
    """A script from a template.

    Args:
        path: a template of the user, which may include the shipped ones and files beside it; None: a shipped one.
        name: of the shipped one.
        variables: all that a template may use; another name is an error.

    Raises:
        ConfigError: the template is missing or faulty, or what it gives is no script.
    """
    template = path or SHIPPED_TEMPLATES / name
    if not template.is_file():
        raise ConfigError.one(_KEY, f"{template} is not a file")
    environment = SandboxedEnvironment(
        loader=ChoiceLoader([FileSystemLoader(template.parent), FileSystemLoader(SHIPPED_TEMPLATES)]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    try:
        script = environment.get_template(template.name).render(variables)
    except TemplateSyntaxError as error:
        raise ConfigError.one(_KEY, f"{error.filename or template}, line {error.lineno}: {error.message}") from error
    except TemplateNotFound as error:
        raise ConfigError.one(_KEY, f"{template}: there is no template {error.name} to include") from error
    except Exception as error:  # a template is a program: it can fail in every way
        raise ConfigError.one(_KEY, f"{template}: {error}") from error
    if not script.startswith("#!"):
        raise ConfigError.one(
            _KEY, f'{template}: the script has to begin with "#!", or sbatch does not take it for one'
        )
    fault = shell_fault(script)
    if fault is not None:
        raise ConfigError.one(_KEY, f"{template} gives a script that bash cannot read: {fault}")
    return script


def shell_fault(script: str) -> str | None:
    """What bash cannot read of a script, or None; also where there is no bash to ask."""
    bash = shutil.which("bash")
    if bash is None:
        return None
    done = subprocess.run([bash, "-n"], input=script, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else "; ".join(done.stderr.strip().split("\n"))
