"""`forebay mount`: a prefix of a bucket as files that can be read."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated

import typer

from gateway.cli.common import fail
from gateway.config.units import parse_duration_seconds
from gateway.policy.slots import Prefix


def mount(
    prefix: Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="What to show: all keys below it.")],
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="An empty directory.")],
    read_only: Annotated[bool, typer.Option("--read-only", help="Indispensable: files can't be written.")] = False,
    endpoint_url: Annotated[
        str | None, typer.Option("--endpoint-url", metavar="URL", help="Forebay's; else AWS_ENDPOINT_URL_S3.")
    ] = None,
    local_socket: Annotated[
        str | None,
        typer.Option(
            "--local-socket",
            metavar="PATH",
            envvar="FOREBAY_LOCAL_SOCKET",
            help="server.local_socket; reads go without HTTP.",
        ),
    ] = None,
    remember: Annotated[
        str, typer.Option("--remember", metavar="TIME", help="How old names, sizes and times may be, such as 60s.")
    ] = "2s",
    allow_other: Annotated[bool, typer.Option("--allow-other", help="Let other users read, too.")] = False,
    foreground: Annotated[bool, typer.Option("--foreground", help="Serve until it is unmounted.")] = False,
) -> None:
    """Show a prefix as a file system that can be read, by FUSE. Keys come from AWS_ACCESS_KEY_ID and the like.

    `umount DIRECTORY` ends it, `fusermount3 -u DIRECTORY` where you are not root.
    """
    try:
        shown = Prefix.parse(prefix)
    except ValueError as error:
        fail(str(error))
    if not read_only:
        fail("only --read-only mounts are made; docs/files.md names file systems that write through Forebay")
    if not shown.bucket:
        fail(f"{prefix!r} names no bucket: s3://BUCKET/PREFIX")
    try:
        remember_seconds = parse_duration_seconds(remember)
    except ValueError as error:
        fail(f"--remember {remember}: {error}")
    try:
        if os.listdir(directory):
            fail(f"{directory} is not empty")
    except OSError as error:
        fail(f"{directory}: {error.strerror}")
    from forebay import mount as served
    from forebay.local import Reader

    below = shown.key_prefix if shown.key_prefix.endswith("/") or not shown.key_prefix else f"{shown.key_prefix}/"
    if local_socket is not None:
        local_socket = os.path.abspath(local_socket)  # the process that serves works in another directory
        if not os.path.exists(local_socket):
            typer.echo(f"forebay: {local_socket} does not exist: bytes come by HTTP until it does", err=True)
    reader = partial(Reader, endpoint_url=endpoint_url, socket_path=local_socket, user_agent="forebay-mount")
    try:
        served.check(shown.bucket, below, reader())
        files = served.Mount(shown.bucket, below, remember_seconds, reader)
        served.serve(files, os.path.abspath(directory), foreground=foreground, allow_other=allow_other)
    except ImportError as error:
        fail(f"{error.name} is missing: pip install 'forebay[mount]'")
    except (ValueError, OSError) as error:
        fail(str(error))
    except RuntimeError as error:
        fail(f"{directory} could not be mounted (exit code {error})")
