"""`notebook-accel launch`: a script, a module, a program or a notebook on the processes that flags and file say."""

from __future__ import annotations

import difflib
import importlib.util
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import rich_click as click
from click.shell_completion import CompletionItem

from ..config.option import as_text
from ..config.schema import flat_values, has_effect, table
from ..errors import ConfigError, Problem
from ..launch.script import Script
from . import flags, notebook
from .places import describe_place
from .plan import Plan, resolve
from .start import describe_command, start

_RANKED_HERE: Final = ("auto", "local", "xla")  # engines whose ranks torch elastic gives


def _add_paradigm_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, (_, text) in reversed(flags.PARADIGMS.items()):
        command = click.option(f"--{flags.normalize(name)}", name, is_flag=True, help=text)(command)
    return command


def _complete_file(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


@click.command(
    cls=flags.FlagCommand,
    context_settings={"allow_interspersed_args": False, **flags.settings()},
    short_help="Run a script.",
)
@click.option("--config-file", "config_file", type=click.Path(), metavar="PATH", help="Config file to use.")
@click.option("--dry-run", "dry_run", is_flag=True, help="Show what would be run, and run nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but what the script says.")
@click.option("-m", "--module", is_flag=True, help="Run a module, as python -m does.")
@click.option("--no-python", "no_python", is_flag=True, help="Run a program without Python.")
@_add_paradigm_flags
@flags.add_flags
@click.option("--no-tpu-cluster", "no_tpu_cluster", is_flag=True, hidden=True)
@click.option("--aws-access-key-id", "aws_access_key_id", hidden=True)
@click.option("--aws-secret-access-key", "aws_secret_access_key", hidden=True)
@click.argument(
    "target",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    shell_complete=_complete_file,
    metavar="SCRIPT [ARGUMENTS]...",
)
def launch(
    target: tuple[str, ...],
    config_file: str | None,
    dry_run: bool,
    quiet: bool,
    module: bool,
    no_python: bool,
    **values: Any,
) -> None:
    """Run a script, a module (-m) or a notebook (.ipynb) on several processes.

    A flag counts more than the config file, and the file more than defaults. All words after the script are the
    script's own. `launch NOTEBOOK.ipynb --help` shows the options of notebooks.
    """
    if module and no_python:
        raise click.UsageError("--module and --no_python exclude each other")
    what = Script(kind="module" if module else "program" if no_python else "script", words=target)
    sys.exit(run(what, values, config_file, dry_run=dry_run, quiet=quiet))


def run(
    script: Script,
    values: Mapping[str, Any],
    config_file: str | None,
    *,
    dry_run: bool = False,
    quiet: bool = False,
    in_place: bool = True,
) -> int:
    """Run a script, module, program or notebook.

    Args:
        script: what to run.
        values: flags; see `plan.resolve`.
        config_file: path of the config; None is the default one, where there is one.
        dry_run: whether to show what would be run, and to run nothing.
        quiet: whether to say nothing but what the script says.
        in_place: whether a single process may take the place of this one, so that this function does not return.

    Returns:
        The exit code.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    wrong: list[Problem] = []
    found = None
    is_notebook = script.kind == "script" and script.words[0].endswith(".ipynb")
    options = notebook.parse(script.words) if is_notebook else None
    try:
        found = resolve(values, config_file)
    except ConfigError as error:
        wrong += error.problems
    missing = _find_missing(script, several=found is not None and found[0].is_distributed)
    wrong += _hint_at_hosts(missing, script, values.get("hosts") or ())
    if found is None or wrong:
        raise ConfigError(list(dict.fromkeys(wrong)))
    plan, remarks = found
    for remark in remarks:
        click.echo(f"Warning: {remark}", err=True)
    if dry_run:
        show(plan, script, options)
        return 0
    if plan.doubts:
        raise ConfigError(plan.doubts)
    if options is None:
        return start(plan, script, quiet=quiet, in_place=in_place)
    for name in ("num_processes", "mixed_precision"):
        if plan.sources[name] == "flag":
            text = f"a notebook runs once, and its own launches say their {name}: give it there, or a config"
            click.echo(f"Warning: {text}", err=True)
    return notebook.run(options, plan.environment)


def _find_missing(script: Script, several: bool) -> list[Problem]:
    """Return why there is nothing to run, for several processes or a single one."""
    name, text = script.words[0], ""
    path = Path(name)
    if script.kind == "module":
        if name.endswith(".py") and path.exists():
            text = f"{name} is a file, no module: leave -m out"
        elif not _has_module(name.partition(".")[0]):
            text = f"there is no module {name}"
    elif script.kind == "program":
        text = "" if shutil.which(name) else f"there is no program {name} that can be run"
    elif path.is_dir():
        is_program = (path / "__main__.py").is_file()  # as for Python itself
        text = "" if is_program else f"{name} is a folder: name the script in it"
    elif path.exists() and not path.is_file():
        text = f"{name} is no file: a single process can read it, not several" if several else ""
    elif not path.exists():
        near = difflib.get_close_matches(path.name, _list_names(path.parent), n=1)
        hint = f", did you mean {path.parent / near[0]}?" if near else f" in {Path.cwd()}"
        text = f"{name} does not exist{hint}"
    return [Problem(name="", text=text)] if text else []


def _hint_at_hosts(missing: list[Problem], script: Script, hosts: Sequence[str]) -> list[Problem]:
    """Return why there is nothing to run; whoever gave hosts may have meant the script's name as another one."""
    if not hosts or script.kind != "script" or Path(script.words[0]).exists():
        return missing
    hint = f"; where it is a host too, write --hosts {','.join([*hosts, script.words[0]])}"
    return [Problem(name=each.name, text=each.text + hint) for each in missing]


def _list_names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def _has_module(name: str) -> bool:
    if Path(f"{name}.py").exists() or Path(name).is_dir():
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, such as __main__
        return name in sys.modules


def show(plan: Plan, script: Script, request: notebook.Request | None = None) -> None:
    """Print what a plan would run, its options and its environment, and where each value is from.

    Args:
        plan: the launch.
        script: what it would run.
        request: the notebook that it would run instead; None for a script.
    """
    click.echo("Command")
    command = _describe_command(plan, script) if request is None else request.command
    click.echo(f"  {shlex.join(command)}")
    title, lines = describe_place(plan.config)
    if request is None and lines:
        _print(title, lines)
    values = flat_values(plan.config)
    rows: list[tuple[str, str, str]] = []
    variables: dict[str, str] = {}
    for option in table():
        value, source = values[option.name], plan.sources[option.name]
        if value is not None and option.face.env:
            variables.setdefault(option.face.env, source)
        is_shown = source != "default" or not option.face.expert
        if value is not None and value != "" and has_effect(option, values) and is_shown:
            rows.append((option.name, as_text(value), source))
    _print("Options", rows)
    given = plan.config.environment
    texts = {name: (text, _find_origin(name, variables, given)) for name, text in plan.environment.items()}
    if plan.is_distributed and request is None and plan.config.engine in _RANKED_HERE:
        texts |= {name: (text, "derived") for name, text in plan.derived.items()}
        for name, text in _describe_ranks(plan).items():
            texts[name] = (text, "torch elastic")
    _print("Environment", [(name, text, source) for name, (text, source) in sorted(texts.items())])
    for problem in plan.doubts:
        click.echo(f"Warning: {problem}", err=True)


def _find_origin(name: str, variables: dict[str, str], given: dict[str, str]) -> str:
    return "file: environment" if name in given else variables.get(name, "derived")


def _print(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    click.echo(f"\n{title}")
    for name, text, source in rows:
        click.echo(f"  {name:{widths[0]}}  {text:{widths[1]}}  {source}".rstrip())


def _describe_command(plan: Plan, script: Script) -> list[str]:
    """Return the command that does the same: torchrun's for processes of this machine, else that of each process."""
    config = plan.config
    if not plan.is_distributed or config.engine not in ("auto", "local"):
        return describe_command(script)
    meeting = ["--standalone"]
    if config.num_machines > 1:
        endpoint = config.rdzv_endpoint or f"{config.main_process_ip}:{config.main_process_port or 29500}"
        least = config.min_machines
        number = config.num_machines if least is None else f"{least}:{config.num_machines}"
        meeting = [f"--nnodes={number}", f"--node-rank={config.machine_rank}"]
        backend = config.rdzv_backend if least is None else "c10d"
        meeting += [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}"]
    elif config.main_process_port:
        meeting = [f"--master-port={config.main_process_port}"]
    kind = {"module": ["-m"], "program": ["--no-python"], "script": []}[script.kind]
    return ["torchrun", *meeting, f"--nproc-per-node={plan.local_world_size}", *kind, *script.words]


def _describe_ranks(plan: Plan) -> dict[str, str]:
    """Return the variables that torch elastic sets, those that differ from rank to rank as a range."""
    config, local = plan.config, plan.local_world_size
    first, least = config.machine_rank * local, config.min_machines
    meets = config.num_machines > 1 and (config.rdzv_backend == "c10d" or least is not None)
    port = config.main_process_port or (29500 if config.num_machines > 1 else "a free one")
    return {
        "RANK": "given as nodes meet" if meets else f"{first}..{first + local - 1}",
        "LOCAL_RANK": f"0..{local - 1}",
        "WORLD_SIZE": f"{'' if least is None else f'{least * local}..'}{config.num_processes}",
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": config.main_process_ip or "127.0.0.1",
        "MASTER_PORT": str(port),
    }
