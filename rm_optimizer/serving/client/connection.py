"""HTTP connection of a client: scoring requests of one version, retried within a deadline."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from email.utils import parsedate_to_datetime
from itertools import chain, groupby
from typing import Any, TypeAlias

from rm_optimizer.core.pairs.pair import Message, Prompt
from rm_optimizer.core.rows.messages import response_json
from rm_optimizer.core.rows.prompts import split_context
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import (
    ConfigError,
    DataError,
    MissingExtra,
    RewardServerRefused,
    RewardServerUnavailable,
    WrongAnswer,
)
from rm_optimizer.schema.checks import require_key
from rm_optimizer.serving.engine import ScoredBatch
from rm_optimizer.serving.options import is_loopback
from rm_optimizer.serving.protocol import REVISION_HEADER, VERSION_HEADER, ErrorBody

try:
    import httpx
    from pydantic import ValidationError
except ModuleNotFoundError as error:
    raise MissingExtra("httpx", "serve") from error

TEMPLATE_BYTES = 256
"""Bytes reserved for the chat template's additions to a text, where only the server tokenizes."""
Conversation: TypeAlias = tuple[Prompt, str]


@dataclass(frozen=True)
class Limits:
    """The most that one request may hold.

    Args:
        tokens: tokens of all its sequences.
        items: number of sequences.
    """

    tokens: int
    items: int


@dataclass(frozen=True)
class Form:
    """Form of a request and of its answer.

    Args:
        path: route of the server.
        body: JSON body of rows, less the model's name and `use_activation`.
        numbers: rewards of an answer, in the order of the rows.
        size: tokens of a row, or an upper bound.
    """

    path: str
    body: Callable[[Sequence[Any]], dict[str, Any]]
    numbers: Callable[[Any], list[Any]]
    size: Callable[[Any], int] = len


def _probabilities(answer: Any) -> list[Any]:
    """`probs[0]` of each datum, in the order of the rows."""
    data = sorted(answer["data"], key=lambda datum: int(datum["index"]))
    return _only_labels([datum["probs"] for datum in data])


def _only_labels(rows: Sequence[Sequence[Any]]) -> list[Any]:
    if any(len(labels) != 1 for labels in rows):
        raise WrongAnswer(f"the server's model has {len(rows[0])} labels; serve a reward model, with one")
    return [labels[0] for labels in rows]


def _most_tokens(row: Conversation) -> int:
    """Upper bound of a row's tokens: the bytes of its text, of which no tokenizer makes more tokens."""
    prompt, response = row
    texts = [prompt] if isinstance(prompt, str) else [part for m in prompt for part in (m.role, m.shown())]
    return TEMPLATE_BYTES + sum(len(text.encode("utf-8", "replace")) for text in (*texts, response))


def _items(rows: Sequence[Conversation]) -> dict[str, Any]:
    """JSON body in which adjacent rows with one prompt are one item."""
    items = []
    for prompt, group in groupby(rows, key=lambda row: row[0]):
        context, messages = split_context(() if isinstance(prompt, str) else prompt)
        shown = prompt if isinstance(prompt, str) else list(map(Message.to_dict, messages))
        items.append({"prompt": shown, "responses": [response_json(text) for _, text in group], **context})
    return {"items": items}


TOKEN_FORM = Form("/classify", lambda rows: {"input": list(map(list, rows))}, _probabilities)
"""Token ids, rendered by the client and independent of the server's template."""
CONVERSATION_FORM = Form("/rm/score", _items, lambda answer: [*chain(*answer["rewards"])], _most_tokens)
"""Prompts and responses, which the server renders as training did."""
TEXT_FORMS: dict[str, Form] = {
    form.path: form
    for form in (
        Form("/classify", lambda texts: {"input": list(texts)}, _probabilities),  # vLLM
        Form("/get_reward", lambda texts: {"query": list(texts)}, lambda answer: list(answer["rewards"])),  # OpenRLHF
        Form(
            "/predict",  # text-embeddings-inference, for which two texts in one list would be a pair
            lambda texts: {"inputs": [[text] for text in texts], "raw_scores": True},
            lambda answer: [label["score"] for label in _only_labels(answer)],
        ),
    )
}
"""Forms of servers that take rendered texts and tokenize them by their own rules, by path."""


def pieces(rows: Sequence[Any], size: Callable[[Any], int], limits: Limits) -> Iterator[range]:
    """Consecutive ranges of rows that each fit into one request; a row beyond the limits gets a separate request.

    Example:
        >>> list(pieces(["aa", "a", "aaaa", "a"], len, Limits(tokens=4, items=2)))
        [range(0, 2), range(2, 3), range(3, 4)]
    """
    start = total = 0
    for index, row in enumerate(rows):
        tokens = size(row)
        if index > start and (total + tokens > limits.tokens or index - start == limits.items):
            yield range(start, index)
            start, total = index, 0
        total += tokens
    if rows:
        yield range(start, len(rows))


def finite_numbers(form: Form, answer: Any, count: int) -> list[float]:
    """The rewards of an answer.

    Raises:
        WrongAnswer: if there are not `count` of them, or one is not finite.
    """
    try:
        numbers = [float(number) for number in form.numbers(answer)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise WrongAnswer(f"the answer of {form.path} has not the form of one: {error!r}") from error
    if len(numbers) != count:
        raise WrongAnswer(f"expected {count} rewards from {form.path}, got {len(numbers)}")
    if not all(map(math.isfinite, numbers)):
        raise WrongAnswer(f"the server gave a reward that is not finite: {numbers}")
    return numbers


RETRIED_STATUSES = frozenset({429, 503})
"""Statuses by which the server asks to retry. After a proxy's 502 or 504 it is unknown if the server was reached."""
RETRIED_ERRORS = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Errors of refused or broken connections. A connection without an answer is not an error; its timeout applies."""
FIRST_DELAY_SECONDS = 0.05
MOST_DELAY_SECONDS = 5.0
CONNECT_SECONDS = 10.0
if logging.getLogger("httpx").level == logging.NOTSET:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request, over a run's progress


def bearer(api_key: str | None) -> dict[str, str]:
    """Authorization header with the key.

    Raises:
        ConfigError: if no header can carry the key.
    """
    if api_key is None:
        return {}
    require_key("api_key", api_key)
    return {"Authorization": f"Bearer {api_key}"}


class Deadline:
    """Time limit of a call, with exponential pauses and jitter between its attempts.

    Args:
        url: address of the server, for the message.
        seconds: seconds for the whole call.
        may_repeat: True if a request is repeated after a failure that may pass.
    """

    def __init__(self, url: str, seconds: float, *, may_repeat: bool = True) -> None:
        self.url = url
        self.seconds = seconds
        self._may_repeat = may_repeat
        self._end = time.monotonic() + seconds
        self._delay = FIRST_DELAY_SECONDS
        self._random = random.Random()  # a separate generator leaves a training run's unchanged

    @property
    def left(self) -> float:
        """Seconds left, at least a millisecond."""
        return max(1e-3, self._end - time.monotonic())

    def timeout(self) -> httpx.Timeout:
        """Timeouts of one attempt."""
        return httpx.Timeout(self.left, connect=min(self.left, CONNECT_SECONDS))

    def judge(
        self,
        got: httpx.Response | httpx.HTTPError,
        url: str,
        is_retried: Callable[[httpx.Response], bool] = lambda answer: answer.status_code in RETRIED_STATUSES,
    ) -> httpx.Response | float:
        """Return a successful answer, or the seconds until the request may be repeated.

        Args:
            got: answer of one attempt, or the error in its place.
            url: address of the request.
            is_retried: True if the same request may succeed after a refusal.

        Raises:
            RewardServerRefused: if the server refuses and a repetition would be refused too.
            RewardServerUnavailable: if no time is left for another attempt, or the request might run twice.
        """
        if isinstance(got, httpx.HTTPError):
            reason = f"{type(got).__name__} {got}".strip()
            if isinstance(got, RETRIED_ERRORS):
                return self.pause(reason)
            raise RewardServerUnavailable(f"{url}: {reason}") from got
        if got.is_success:
            return got
        failure = refusal(got)
        if not is_retried(got):
            raise failure
        return self.pause(str(failure), retry_after(got))

    def pause(self, reason: str, least: float | None = None) -> float:
        """Seconds until the next attempt.

        Args:
            reason: error of the last attempt.
            least: seconds that the server asked for.

        Raises:
            RewardServerUnavailable: if that is later than the deadline, or there is only one attempt.
        """
        if not self._may_repeat:
            raise RewardServerUnavailable(f"{self.url}: {reason}")
        pause = max(self._delay * self._random.uniform(0.5, 1.0), least or 0.0)
        self._delay = min(2 * self._delay, MOST_DELAY_SECONDS)
        if time.monotonic() + pause >= self._end:
            raise RewardServerUnavailable(f"{self.url} gave no answer within {self.seconds:g} s: {reason}")
        return pause


def retry_after(response: httpx.Response) -> float | None:
    """Seconds of an answer's `Retry-After`, a number or a date; None if absent or unreadable."""
    text = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def refusal(response: httpx.Response) -> RewardServerRefused:
    """Error of an unsuccessful answer, with the server's own message if it has one."""
    try:
        detail = ErrorBody.model_validate({"error": response.json()["error"]}).error
    except (ValueError, KeyError, TypeError, ValidationError):
        text = response.text[:200] or response.reason_phrase
        return RewardServerRefused(f"{response.url}: {response.status_code} {text}", response.status_code, "HttpError")
    where = f" ({detail.param})" if detail.param and detail.param not in detail.message else ""
    message = f"{response.url}: {response.status_code} {detail.message}{where}"
    return RewardServerRefused(message, response.status_code, detail.type)


@dataclass(frozen=True, eq=False)
class _Session:
    """Open connections of one process and one event loop."""

    http: httpx.AsyncClient
    slots: asyncio.Semaphore
    connecting: asyncio.Lock


@dataclass(eq=False, repr=False)
class PickledByArguments:
    """Client of servers that is pickled by its arguments alone; the copy opens its own connections.

    Args:
        url: address of the server, `http://host:port`; several are separated by commas.

    Raises:
        ConfigError: if an address is not of this form.
    """

    url: str

    def __post_init__(self) -> None:
        for url in self.urls:
            try:
                is_http = httpx.URL(url).scheme in ("http", "https")
            except httpx.InvalidURL:
                is_http = False
            if not is_http:
                raise ConfigError(f"url must be like http://127.0.0.1:8000, got {url!r}")
        self.url = ",".join(self.urls)
        self._prepare()

    @property
    def urls(self) -> list[str]:
        """The addresses, one by one."""
        if not isinstance(self.url, str):
            raise ConfigError(f"url must be like http://127.0.0.1:8000, got {self.url!r}; separate several by commas")
        return [url.strip().rstrip("/") for url in self.url.split(",")]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _prepare(self) -> None:
        """Make what the arguments describe, without a connection."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, arguments: dict[str, Any]) -> None:
        vars(self).update(arguments)
        self._prepare()


@dataclass(eq=False, repr=False)
class ClientArguments(PickledByArguments):
    """Arguments of a client.

    Args:
        url: address of the server, `http://host:port`; several are separated by commas.
        renderer: renderer of the served model; None lets the server render. Required for a plain vLLM.
        api_key: bearer token; None sends none.
        timeout_seconds: seconds for a whole call, retries included.
        concurrency: largest number of requests open at once.
        revision: serial number of the only accepted weights, `ScoredBatch.revision`; None accepts any.
        hedge_seconds: seconds without an answer after which another of several servers is asked too.
        transport: replacement of the network for tests; None uses the network.
    """

    _: KW_ONLY
    renderer: ConversationRenderer | None = None
    api_key: str | None = None
    timeout_seconds: float = 60.0
    concurrency: int = 8
    revision: int | None = None
    hedge_seconds: float = 5.0
    transport: httpx.AsyncBaseTransport | None = None


class Connection(ClientArguments):
    """Requests to one server."""

    def _prepare(self) -> None:
        self._sessions: dict[tuple[int, asyncio.AbstractEventLoop], _Session] = {}

    def _session(self) -> _Session:
        """Open session of this process and its running loop; sessions of a parent before a fork stay untouched."""
        here = os.getpid(), asyncio.get_running_loop()
        if here not in self._sessions or self._sessions[here].http.is_closed:
            open_ones = {where: one for where, one in list(self._sessions.items()) if not where[1].is_closed()}
            http = httpx.AsyncClient(
                headers=bearer(self.api_key),
                limits=httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency),
                transport=self.transport,
                trust_env=not is_loopback(httpx.URL(self.urls[0]).host),  # this machine is reached without a proxy
            )
            one = _Session(http, asyncio.Semaphore(self.concurrency), asyncio.Lock())
            self._sessions = open_ones | {here: one}
        return self._sessions[here]

    async def close(self) -> None:
        """Close the session; a later call opens another."""
        if self._sessions:
            await self._session().http.aclose()

    async def ask(
        self, form: Form, rows: Sequence[Any], model: str, deadline: Deadline, *, use_activation: bool = False
    ) -> ScoredBatch:
        """Rewards of one request; a request that is too large for the server is sent in halves.

        Args:
            form: form of the request and of its answer.
            rows: rows to score, of the form's type.
            model: name of the served model.
            deadline: time limit of the call.
            use_activation: ask for sigmoids.

        Raises:
            DataError: if a text cannot be sent.
        """
        body = {**form.body(rows), "use_activation": use_activation, "model": model}
        try:
            response = await self.request("POST", form.path, deadline, json=body)
            answer = response.json()
        except RewardServerRefused as error:
            if error.status != 413 or len(rows) < 2:
                raise
            middle = len(rows) // 2
            while True:
                first, second = [
                    await self.ask(form, half, model, deadline, use_activation=use_activation)
                    for half in (rows[:middle], rows[middle:])
                ]
                if first.weights == second.weights:
                    return ScoredBatch(first.rewards + second.rewards, *first.weights)
                deadline.pause("the weights changed between two halves of a request")
        except UnicodeEncodeError as error:
            raise DataError("a text holds half of a UTF-16 surrogate pair, not a character; remove it") from error
        except ValueError as error:
            raise WrongAnswer(f"{self.url}{form.path} did not answer with JSON") from error
        numbers = finite_numbers(form, answer, len(rows))
        told = answer if isinstance(answer, dict) else {}
        version = response.headers.get(VERSION_HEADER) or told.get("rm_version") or told.get("model")
        revision = response.headers.get(REVISION_HEADER)
        return ScoredBatch(tuple(numbers), str(version), None if revision is None else int(revision))

    async def request(self, method: str, path: str, deadline: Deadline, **content: Any) -> httpx.Response:
        """First successful answer, with as many attempts as the deadline allows.

        Raises:
            RewardServerUnavailable: if no answer comes in time.
            RewardServerRefused: if the server refuses.
        """
        while True:
            session = self._session()
            got: httpx.Response | httpx.HTTPError
            try:
                async with session.slots:
                    got = await session.http.request(method, self.url + path, timeout=deadline.timeout(), **content)
            except httpx.HTTPError as error:
                got = error
            judged = deadline.judge(got, self.url + path)
            if isinstance(judged, httpx.Response):
                return judged
            await asyncio.sleep(judged)
