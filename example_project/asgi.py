"""The example project as ASGI application."""

import os

from django.conf import settings
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.asgi import get_asgi_application

from example_project.next_turns import take_next_turns

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

application = get_asgi_application()
take_next_turns()
if settings.DEBUG:
    # An ASGI server does not serve static files. Behind a web server this is not needed.
    application = ASGIStaticFilesHandler(application)
