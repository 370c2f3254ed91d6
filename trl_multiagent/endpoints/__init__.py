"""Models that answer over the network: OpenAI-compatible endpoints and Anthropic, through their own clients."""

from trl_multiagent.endpoints.client import EndpointClient
from trl_multiagent.endpoints.endpoint import EndpointError, EndpointSettings, make_endpoint
from trl_multiagent.endpoints.files import Answer, Question


Endpoint = EndpointSettings  # its former name

__all__ = ["Answer", "Endpoint", "EndpointClient", "EndpointError", "EndpointSettings", "Question", "make_endpoint"]
