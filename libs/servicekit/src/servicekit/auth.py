"""Who is calling: users by the yard's bearer token, attempts by a signed token that names job, attempt and fence,
and the artifacts that the attempt may use.

Every service verifies both offline. The attempt token is a JWT signed with Ed25519 by the launcher; services need its
public key alone.
"""

from __future__ import annotations

import hmac
import math
import re
import secrets
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from servicekit.disk import create_once
from servicekit.errors import InvalidArgument, PermissionDenied, Unauthenticated
from servicekit.grants import Grants

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PRIVATE_KEY_FILE = "attempt.key"
PUBLIC_KEY_FILE = "attempt.pub"
_ISSUER = "trainyard"
_ALGORITHM = "EdDSA"
_DELIVERY = "delivery"
_FENCES = 2**31
_WORKSPACE = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_TOKEN_MIN = 16  # characters; ours have 43


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a method."""

    kind: Literal["user", "attempt", "delivery"]
    """`delivery`: the launcher, for an attempt that is over and whose records are not all delivered."""
    workspace: str = ""  # "" for a user: every workspace
    job_id: str = ""
    attempt_id: str = ""
    fence: int = 0
    grants: Grants | None = None  # of an attempt; None when its token names none: an older version minted it
    expires_s: float = math.inf
    """When the token ends, in seconds since the epoch."""
    database_id: str = ""
    """Of the scheduler's database that has the job; "" when an older version minted the token."""
    operator: bool = False
    """Of a user: it is the operator, by its own token."""

    @property
    def expired(self) -> bool:
        """Whether the token has ended."""
        return time.time() >= self.expires_s

    def check(self) -> None:
        """Refuses a token that has ended, for instance while its stream was open.

        Raises:
            Unauthenticated: TokenExpired.
        """
        if self.expired:
            raise Unauthenticated(
                "this attempt's token has expired",
                reason="TokenExpired",
                hint="the launcher renews it over the agent's session; call again with the new one",
            )


_principal: ContextVar[Principal] = ContextVar("principal")


def current_principal() -> Principal:
    """The caller of the method that runs now.

    Raises:
        Unauthenticated: outside of a call that was authenticated.
    """
    try:
        return _principal.get()
    except LookupError:
        raise Unauthenticated("this call carries no identity", reason="NoIdentity") from None


def set_principal(principal: Principal) -> None:
    """Set by the server for the call that runs now."""
    _principal.set(principal)


def require_user() -> Principal:
    """The caller, who must be a user.

    Raises:
        PermissionDenied: the caller is an attempt.
    """
    principal = current_principal()
    if principal.kind != "user":
        raise PermissionDenied(
            "an attempt's token may not call this method",
            reason="UserOnly",
            hint="use the token in TRAINYARD_HOME/token",
        )
    return principal


def require_operator(what: str) -> None:
    """Refuses every caller but the operator, which alone may say `what`.

    Raises:
        PermissionDenied: OperatorOnly.
    """
    if not current_principal().operator:
        raise PermissionDenied(
            f"only the operator may say {what}",
            reason="OperatorOnly",
            hint="leave it unset, or apply the document with kubectl",
        )


def require_workspace(workspace: str) -> str:
    """The workspace a call is about ("" means default), which the caller must be allowed to use.

    Raises:
        InvalidArgument: BadWorkspace: it cannot name one. Names become labels of metrics and parts of paths.
        PermissionDenied: the caller's token is for another workspace.
    """
    wanted = workspace or "default"
    if not _WORKSPACE.fullmatch(wanted):
        raise InvalidArgument(
            f"'{wanted[:64]}' cannot name a workspace",
            reason="BadWorkspace",
            hint="use 1 to 63 of a-z, 0-9 and '-', and begin with a letter or digit",
        )
    principal = current_principal()
    if principal.workspace and principal.workspace != wanted:
        raise PermissionDenied(
            f"this token is for workspace '{principal.workspace}', not '{wanted}'", reason="WrongWorkspace"
        )
    return wanted


def bearer_token(home: Path) -> str:
    """The users' token of this yard, made at first start, readable by its owner alone.

    Raises:
        ValueError: its file holds none.
    """
    path = home / "token"
    if path.exists():
        token = path.read_text().strip()
        if len(token) < _TOKEN_MIN:
            raise ValueError(f"{path} holds no token: remove it, and the next start makes a new one")
        return token
    return create_once(path, secrets.token_urlsafe(32).encode()).decode().strip()


class AttemptVerifier:
    """Verifies attempt tokens: what every service but the launcher needs."""

    def __init__(self, public_key: Ed25519PublicKey) -> None:
        self._public_key = public_key

    @classmethod
    def load(cls, path: Path) -> AttemptVerifier:
        """With the public key in a PEM file.

        Raises:
            ValueError: the file holds none, or cannot be read.
        """
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            key = serialization.load_pem_public_key(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: no public key can be read: {error}") from error
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError(f"{path} does not hold an Ed25519 public key")
        return cls(key)

    def verify(self, token: str) -> Principal:
        """The attempt a token was minted for. Whether it has expired is for the caller to `check`.

        Raises:
            Unauthenticated: it is not ours, or was changed.
        """
        import jwt

        try:
            claims = jwt.decode(
                token,
                self._public_key,
                algorithms=[_ALGORITHM],
                issuer=_ISSUER,
                options={"require": ["exp", "iss", "sub"], "verify_exp": False},
            )
            return _attempt(claims)
        # PyJWT lets the errors of odd numbers through: TypeError for a list, OverflowError for an infinite time.
        except (jwt.PyJWTError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise Unauthenticated(f"attempt token refused: {error}", reason="BadAttemptToken") from error


def _attempt(claims: Mapping[str, object]) -> Principal:
    """The principal that claims describe.

    Raises:
        KeyError, ValueError: a claim is missing or not of its type.
    """
    texts = [claims[name] for name in ("ws", "job", "sub")]
    fence = claims["fence"]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the claims 'ws', 'job' and 'sub' are not all strings")
    if not isinstance(fence, int) or isinstance(fence, bool) or not 0 <= fence < _FENCES:
        raise ValueError("the claim 'fence' is not the number of an attempt")
    workspace, job_id, attempt_id = map(str, texts)
    expires_s = float(str(claims["exp"]))
    if not math.isfinite(expires_s):
        raise ValueError("the claim 'exp' is not a time")
    kind: Literal["delivery", "attempt"] = "delivery" if claims.get("use") == _DELIVERY else "attempt"
    grants = Grants.from_claim(claims.get("art"))
    return Principal(kind, workspace, job_id, attempt_id, fence, grants, expires_s, str(claims.get("db", "")))


class AttemptTokens(AttemptVerifier):
    """Mints attempt tokens as well: the launcher, which holds the private key."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        super().__init__(private_key.public_key())
        self._private_key = private_key

    @classmethod
    def load_or_create(cls, home: Path) -> AttemptTokens:
        """The key of this yard (`attempt.key`, mode 0600), made at first start with `attempt.pub` beside it."""
        return cls.load_private(home / PRIVATE_KEY_FILE, create=True)

    @classmethod
    def load_private(cls, path: Path, *, create: bool = False) -> AttemptTokens:
        """With the private key in a PEM file; its public half is written beside it for the other services.

        Raises:
            ValueError: the file holds none.
            FileNotFoundError: there is none, and none is to be created.
        """
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if path.exists() or not create:
            pem = path.read_bytes()
        else:
            pem = create_once(
                path,
                Ed25519PrivateKey.generate().private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                ),
            )
        key = serialization.load_pem_private_key(pem, password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"{path} does not hold an Ed25519 key: move it away and start again")
        public = path.with_name(PUBLIC_KEY_FILE)
        if not public.exists():
            create_once(
                public,
                key.public_key().public_bytes(
                    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
                ),
            )
        return cls(key)

    def mint(
        self,
        workspace: str,
        job_id: str,
        attempt_id: str,
        fence: int,
        ttl_s: float,
        grants: Grants | None = None,
        *,
        delivery: bool = False,
        database_id: str = "",
    ) -> tuple[str, int]:
        """A token for one attempt, and when it expires (nanoseconds since the epoch).

        Args:
            grants: artifacts that the attempt may use. Without them the token has the form of older versions, with
                which the artifact store lets an attempt use what its own job made, and nothing else.
            delivery: for the launcher itself, which delivers what an attempt that is over had not delivered.
            database_id: of the scheduler's database that has the job.
        """
        import jwt

        expires_s = time.time() + ttl_s
        claims: dict[str, object] = {
            "iss": _ISSUER,
            "sub": attempt_id,
            "exp": expires_s,
            "ws": workspace,
            "job": job_id,
            "fence": fence,
        }
        if delivery:
            claims["use"] = _DELIVERY
        if database_id:
            claims["db"] = database_id
        if grants is not None:
            claims["art"] = grants.claim()
        return jwt.encode(claims, self._private_key, algorithm=_ALGORITHM), int(expires_s * 1e9)


class Authenticator:
    """Turns the `authorization` metadata of a call into a principal.

    Args:
        bearer: the users' token.
        tokens: verifies those of attempts.
        operator_token: of the operator; "" when it has none of its own.

    Raises:
        ValueError: operator and users have the same token.
    """

    def __init__(self, bearer: str, tokens: AttemptVerifier, operator_token: str = "") -> None:
        if operator_token and bearer == operator_token:
            raise ValueError("the operator's token is the users' token: give the operator one of its own")
        self._bearer = bearer.encode()
        self._operator_token = operator_token.encode()
        self._tokens = tokens
        self._verified: dict[str, tuple[Principal, float]] = {}

    def authenticate(self, header: str, *, renewing: bool = False) -> Principal:
        """The caller.

        Args:
            renewing: a token that has expired still says who calls.

        Raises:
            Unauthenticated: no token, or not one of this yard's.
        """
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated(
                "this call carries no bearer token",
                reason="NoToken",
                hint="send 'authorization: Bearer <token>'; the token is in TRAINYARD_HOME/token",
            )
        if hmac.compare_digest(token.encode(), self._bearer):
            return Principal("user")
        if self._operator_token and hmac.compare_digest(token.encode(), self._operator_token):
            return Principal("user", operator=True)
        if token.count(".") != 2:
            raise Unauthenticated(
                "this is not the yard's token",
                reason="BadToken",
                hint="read it again from TRAINYARD_HOME/token: each home has its own",
            )
        principal = self._verify_attempt(token)
        if not renewing:
            principal.check()
        return principal

    def _verify_attempt(self, token: str) -> Principal:
        # Agents call often with the same token; a signature is checked once a minute.
        known = self._verified.get(token)
        now = time.monotonic()
        if known and known[1] > now:
            return known[0]
        principal = self._tokens.verify(token)
        if len(self._verified) > 10_000:
            self._verified.clear()
        self._verified[token] = (principal, now + 60)
        return principal
