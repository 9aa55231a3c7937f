"""The site of `tests.chat.site` as an ASGI application."""

from django.core.asgi import get_asgi_application

application = get_asgi_application()
