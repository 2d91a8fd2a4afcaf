"""`streamsrv serve`."""

import argparse
import asyncio
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import uvloop

from streamsrv.cli.progress_bars import progress_bars
from streamsrv.cli.setting_help import setting_help
from streamsrv.config import ENV_PREFIX, Settings, load_settings
from streamsrv.log_format import configure_logging

_METAVARS = {"model": "PATH|demo", "model_name": "NAME", "engine": "NAME"}
_METAVARS |= dict.fromkeys(["listen", "metrics_listen", "admin_listen"], "HOST:PORT") | {
    "otlp_endpoint": "URL"
}
_METAVARS |= dict.fromkeys(["tls_cert", "tls_key", "tls_client_ca", "api_keys", "admin_keys"], "FILE")
_METAVARS |= {"load": "NAME,...", "default_model": "NAME"}


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    serve = commands.add_parser(
        "serve",
        help="serve a model, or a folder of them",
        description="Serve a model, or those of a folder, until SIGTERM or Ctrl-C; live streams then get "
        "time to finish. Prints 'listening on HOST:PORT' when it is ready.",
        epilog=f"Every setting can be given as a variable, too ({ENV_PREFIX}LISTEN for --listen), or in a "
        'TOML file (listen = "..."). A flag wins over a variable, a variable over the file.',
    )
    serve.add_argument(
        "--config", type=Path, metavar="FILE", help=f"TOML file with settings; or {ENV_PREFIX}CONFIG"
    )
    for name, field in Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        kind = _plain_type(field.annotation)
        text = setting_help(name)
        if kind is bool:
            serve.add_argument(
                flag, dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            serve.add_argument(
                flag,
                dest=name,
                metavar=_METAVARS.get(name) or _metavar(kind),
                default=argparse.SUPPRESS,
                help=text,
            )
    serve.set_defaults(command=_serve)


def _plain_type(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        return next(arg for arg in get_args(annotation) if arg is not type(None))
    return annotation


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(member.value for member in kind)
    return {int: "N", float: "X", Path: "DIR"}.get(kind, "TEXT")


def _serve(arguments: argparse.Namespace) -> None:
    from streamsrv.opening import open_model  # heavy: not for --help
    from streamsrv.server import check_files, serve

    flags = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    settings = load_settings(flags, arguments.config)
    configure_logging(settings.log_level, settings.log_format)
    check_files(settings)
    engine = None
    if settings.models is None:
        with progress_bars() as report:
            engine = open_model(settings, report)
    try:
        uvloop.run(serve(settings, engine))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # a second signal
    finally:
        if engine is not None:
            engine.close()
