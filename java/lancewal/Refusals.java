package lancewal;

import java.util.function.Supplier;
import org.apache.spark.sql.errors.QueryCompilationErrors;

/** What lancewal refuses, as the error that Spark has for Python data sources. */
final class Refusals {
  private Refusals() {}

  static <T> T shown(Supplier<T> call) {
    try {
      return call.get();
    } catch (PythonCalls.RefusedException refused) {
      throw sneaky(
          QueryCompilationErrors.pythonDataSourceError(
              refused.question, PythonCalls.FORMAT, refused.kind + ": " + refused.getMessage()));
    }
  }

  /** Spark's own errors are checked ones, and its interfaces declare none. */
  @SuppressWarnings("unchecked")
  static <E extends Throwable> RuntimeException sneaky(Throwable error) throws E {
    throw (E) error;
  }
}
