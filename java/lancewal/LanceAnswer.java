package lancewal;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.connector.read.LocalScan;
import org.apache.spark.sql.execution.arrow.ArrowConverters$;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CloseableIterator;
import scala.Tuple2;

/** The rows of a query that needs few of them, read while it was planned. Spark starts no task for it. */
record LanceAnswer(StructType readSchema, InternalRow[] rows, String description) implements LocalScan {
  /** More rows are shown by a task, which need not convert them. */
  private static final int MOST_ROWS = 1_000;

  /** Of rows as an Arrow stream; null if they are more than a driver should hold one by one. */
  static LanceAnswer of(byte[] stream, StructType columns, String description) {
    Tuple2<CloseableIterator<InternalRow>, StructType> read = ArrowConverters$.MODULE$.fromIPCStream(stream);
    UnsafeProjection projection = UnsafeProjection.create(columns);
    List<InternalRow> found = new ArrayList<>();
    try (CloseableIterator<InternalRow> rows = read._1()) {
      while (rows.hasNext()) {
        if (found.size() == MOST_ROWS) {
          return null;
        }
        // A copy: the memory behind a row is released with the stream. Its own copy() fails on null items.
        found.add(projection.apply(rows.next()).copy());
      }
    } catch (Exception error) {
      throw Refusals.sneaky(error);
    }
    return new LanceAnswer(columns, found.toArray(InternalRow[]::new), description);
  }
}
