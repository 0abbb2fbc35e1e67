"""OpenAI-shaped HTTP over an Engine: create_app for embedding, serve for a whole process."""

from .app import create_app
from .options import ServerOptions
from .run import serve

__all__ = ["ServerOptions", "create_app", "serve"]
