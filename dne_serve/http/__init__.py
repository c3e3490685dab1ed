"""Speak HTTP: routes, bodies, middleware, schemas, problem documents, pages."""
