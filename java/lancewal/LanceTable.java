package lancewal;

import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsRowLevelOperations;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.RowLevelOperationBuilder;
import org.apache.spark.sql.connector.write.RowLevelOperationInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** A table of lancewal for Spark's planner. Rows are read and written by Python workers. */
class LanceTable implements SupportsRead, SupportsWrite, SupportsRowLevelOperations {
  private static final String PATH = "path";

  private final String name;
  private final Map<String, String> options;
  final PythonCalls.Description described;

  LanceTable(LanceTable other) {
    this(other.name, other.options, other.described);
  }

  LanceTable(String name, Map<String, String> options, PythonCalls.Description described) {
    this.name = name;
    this.options = options;
    this.described = described;
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  @SuppressWarnings("deprecation")
  public StructType schema() {
    return described.schema();
  }

  @Override
  public Transform[] partitioning() {
    return new Transform[0];
  }

  @Override
  public Map<String, String> properties() {
    return described.properties();
  }

  @Override
  public Set<TableCapability> capabilities() {
    return Set.of(TableCapability.BATCH_READ, TableCapability.BATCH_WRITE, TableCapability.STREAMING_WRITE);
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap given) {
    CaseInsensitiveStringMap all = merged(given);
    boolean more = !all.equals(new CaseInsensitiveStringMap(options));
    return new LanceScanBuilder(more ? Refusals.shown(() -> PythonCalls.describe(all)) : described, all);
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    return pythonWriter(info.queryId(), info.schema(), info.options());
  }

  @Override
  public RowLevelOperationBuilder newRowLevelOperationBuilder(RowLevelOperationInfo info) {
    return () -> new RowChanges(this, info);
  }

  /** Spark's own writer of Python data sources, for rows of {@code schema}. */
  WriteBuilder pythonWriter(String queryId, StructType schema, CaseInsensitiveStringMap given) {
    CaseInsensitiveStringMap all = merged(given);
    PythonTable table = new PythonTable(PythonCalls.freshSource(), PythonCalls.FORMAT, described.schema());
    return table.newWriteBuilder(
        new LogicalWriteInfo() {
          @Override
          public CaseInsensitiveStringMap options() {
            return all;
          }

          @Override
          public String queryId() {
            return queryId;
          }

          @Override
          public StructType schema() {
            return schema;
          }

          @Override
          public Optional<StructType> rowIdSchema() {
            return Optional.empty();
          }

          @Override
          public Optional<StructType> metadataSchema() {
            return Optional.empty();
          }
        });
  }

  /** The table's options and those of one query, which win, except that they cannot say another place. */
  private CaseInsensitiveStringMap merged(CaseInsensitiveStringMap given) {
    Map<String, String> all = new TreeMap<>(String.CASE_INSENSITIVE_ORDER);
    all.putAll(options);
    String place = all.get(PATH);
    all.putAll(given.asCaseSensitiveMap());
    if (place != null && !place.equals(all.get(PATH))) {
      throw new UnsupportedOperationException(
          "the table is at " + place + ", and the option path says " + all.get(PATH) + "; leave it out");
    }
    return new CaseInsensitiveStringMap(all);
  }
}
