"""Models that answer over the network: OpenAI-compatible endpoints and Anthropic, through their own clients."""

from trl_multiagent.endpoints.client import EndpointClient
from trl_multiagent.endpoints.endpoint import Endpoint, EndpointError, make_endpoint
from trl_multiagent.endpoints.files import Answer, Question


__all__ = ["Answer", "Endpoint", "EndpointClient", "EndpointError", "Question", "make_endpoint"]
