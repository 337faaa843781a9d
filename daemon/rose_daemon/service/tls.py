"""The certificate of a server, and taking over a new one while it serves."""

from __future__ import annotations

import ssl

from rose.errors import ConfigError


def server_context(section: str, cert: str, key: str) -> ssl.SSLContext | None:
    """The TLS context of a server; None where no certificate is configured.

    `section` names the settings in errors.  Raises ConfigError.
    """
    if bool(cert) != bool(key):
        raise ConfigError(f"{section}.tls_cert and {section}.tls_key go together")
    if not cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    renew(context, section, cert, key)
    return context


def renew(context: ssl.SSLContext, section: str, cert: str, key: str) -> None:
    """Have new connections see this certificate.  Raises ConfigError."""
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{section}.tls_cert: cannot be used: {error}") from None
