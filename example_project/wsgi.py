"""The example project as WSGI application."""

import os

from django.core.wsgi import get_wsgi_application

from example_project.next_turns import take_next_turns

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

application = get_wsgi_application()
take_next_turns()
