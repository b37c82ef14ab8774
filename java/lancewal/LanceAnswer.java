package lancewal;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.read.LocalScan;
import org.apache.spark.sql.execution.arrow.ArrowConverters$;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CloseableIterator;
import scala.Tuple2;

/** The rows of a query that needs few of them, read while it was planned. Spark starts no task for it. */
record LanceAnswer(StructType readSchema, InternalRow[] rows, String description) implements LocalScan {
  /** Of rows as an Arrow stream. */
  static LanceAnswer of(byte[] stream, StructType columns, String description) {
    Tuple2<CloseableIterator<InternalRow>, StructType> read = ArrowConverters$.MODULE$.fromIPCStream(stream);
    List<InternalRow> found = new ArrayList<>();
    try (CloseableIterator<InternalRow> rows = read._1()) {
      while (rows.hasNext()) {
        // A copy: the memory behind a row is released with the stream.
        found.add(rows.next().copy());
      }
    } catch (Exception error) {
      throw Refusals.sneaky(error);
    }
    return new LanceAnswer(columns, found.toArray(InternalRow[]::new), description);
  }
}
