"""The APIs of the gateway: requests to conversations, responses to JSON and to events of a stream."""
