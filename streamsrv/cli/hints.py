"""What to do where a message is gRPC's own, or the server's to a programmer."""

import argparse

from engines.api import StreamsrvError
from streamsrv.errors import CallFailedError, StreamIncompleteError

_SIGNS = (
    # By whether TLS was asked for, and a part of what gRPC says.
    (
        True,
        "WRONG_VERSION_NUMBER",
        "The server there speaks no TLS: leave out --tls, --tls-ca and --tls-cert",
    ),
    (True, "CERTIFICATE_VERIFY_FAILED", "--tls-ca FILE names the authority that signed its certificate"),
    (True, "Hostname Verification", "Its certificate is not for this name: --server takes one that it has"),
    (True, "Socket closed", "If it asks for client certificates, --tls-cert and --tls-key show one"),
    (False, "Socket closed", "If the server there speaks TLS, --tls or --tls-ca FILE does, too"),
    (False, "Failed parsing HTTP/2", "What is there is no gRPC server; --server names another"),
    (False, "before receiving SETTINGS", "What is there is no gRPC server; --server names another"),
)


def hint(error: StreamsrvError, arguments: argparse.Namespace) -> str:
    """Say in a sentence what to do about an error of a command; empty where its message does."""
    if not isinstance(error, CallFailedError):
        return ""
    flags = vars(arguments)
    if error.code == "DEADLINE_EXCEEDED" and flags.get("timeout") is not None:
        return f"The {arguments.timeout:g} s of --timeout were over"
    if error.code == "UNAUTHENTICATED":
        return "--api-key-file FILE takes a key, as STREAMSRV_API_KEY does"
    if error.server_reason:
        return ""
    if error.code == "UNIMPLEMENTED":
        if flags.get("is_admin"):
            return "--server is to be the server's --admin-listen, which is off by default"
        return "--server is to be a server's --listen, where it answers requests"
    if error.code != "UNAVAILABLE":
        return ""
    if isinstance(error, StreamIncompleteError):
        return "The server went away while it answered; `streamsrv health` tells when it serves"
    is_tls = any(flags.get(name) for name in ("tls", "tls_ca", "tls_cert"))
    for for_tls, sign, text in _SIGNS:
        if for_tls == is_tls and sign in error.message:
            return text
    serve = (
        "streamsrv serve --models DIR --admin-listen HOST:PORT"
        if flags.get("is_admin")
        else "streamsrv serve"
    )
    return f"Is a server running there? `{serve}` starts one; --server names another"
