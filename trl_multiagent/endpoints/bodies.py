"""Limits how much of an answer is read. This imports httpx2, which the providers' clients use."""

from collections.abc import AsyncIterator

import httpx2

from trl_multiagent.endpoints.endpoint import EndpointError


MAX_BODY = 8 * 2**20  # bytes; the longest answers of models have about one million


class LimitedStream(httpx2.AsyncByteStream):
    """
    The body of an answer, which is an error once it is longer than `MAX_BODY`.

    Args:
        stream (`httpx2.AsyncByteStream`): The body.
    """

    def __init__(self, stream: httpx2.AsyncByteStream):
        self.stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = 0
        async for chunk in self.stream:
            received += len(chunk)
            if received > MAX_BODY:
                raise EndpointError(f"its answer is longer than {MAX_BODY} bytes", retry=True)
            yield chunk

    async def aclose(self) -> None:
        await self.stream.aclose()


async def limit_body(response: httpx2.Response) -> None:
    """
    Limits the body of a response that has not been read yet, whatever its status.

    Raises:
        EndpointError: it is compressed, which was not asked for: a short text could become a very long one.
    """
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise EndpointError("its answer is compressed, which the request did not allow", retry=True)
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = LimitedStream(response.stream)
