"""Makes ``format("lancewal")`` known to Spark, which imports every module named ``pyspark_*``."""

from lancewal.spark.source import DefaultSource

__all__ = ["DefaultSource"]
