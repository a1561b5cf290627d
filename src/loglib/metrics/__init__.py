"""Exporters of `Topic.stats`: for Prometheus (`loglib.metrics.prometheus`) and OpenTelemetry (`.opentelemetry`)."""
