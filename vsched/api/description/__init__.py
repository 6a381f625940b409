"""Description of the API, as an OpenAPI document and as a page."""
